"""A strategy from another distribution is found, offered, launched and tested like our own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_launch.cli import run
from forked_programs import CPU, launch

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "third_party_plugin"
MINIMAL = str(ROOT / "examples" / "minimal.py")
CHECKS = (
    "ranks2 and (training_equals_one_process or global_norm or cost_equals_ledger or bit_by_bit"
    " or evaluation_is_the_same)"
)


@pytest.fixture
def installed(tmp_path):
    """Install the example into a folder of its own, offline, and return the folder."""
    # A copy is built: nothing may be left in the tree.
    shutil.copytree(PLUGIN, tmp_path / "plugin")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", "site", "./plugin"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path / "site"


def test_it_is_offered_and_planned_and_trains_as_another_strategy(
    installed, tmp_path, monkeypatch, capsys
):
    env = {"PYTHONPATH": str(installed)}
    done = [
        launch("--nproc-per-node", "2", "--strategy", name, MINIMAL, folder=tmp_path, env=env)
        for name in ("flat", "ddp")
    ]
    assert [each.returncode for each in done] == [0, 0], done
    losses = [float(line.split()[-1]) for line in done[0].stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert done[0].stdout == done[1].stdout

    monkeypatch.syspath_prepend(str(installed))

    def command(*words):
        assert run(words) == 0
        return capsys.readouterr().out

    text = command("launch", "--help")
    assert "flat      one all-reduce of each bucket of gradients" in text
    summed = ("--strategy", "flat", "--set", "strategy.mean=false", "--dry-run")
    assert "--set strategy.mean=false" in command("launch", *summed)
    # The same step as that of ddp, but for the size of buckets.
    sizes = "layers=4,hidden=1024,heads=16,seq=1024"
    plan = ("plan", "--gpt", sizes, "--batch", "16", "--hardware", "a100-80gb", "--json")
    flat, ddp = (
        json.loads(command(*plan, "--layout", f"micro_batch=2,data_parallel={name}"))
        for name in ("flat", "ddp")
    )
    assert flat["strategy"] == "flat"
    assert flat["sent"]["dp"] == ddp["sent"]["dp"]
    assert flat["held"] == ddp["held"]
    assert flat["step_seconds"] == pytest.approx(ddp["step_seconds"], rel=0.1)
    found = json.loads(command(*plan, "--devices-per-host", "1"))
    assert any("data_parallel=flat" in each["layout"] for each in found)


@pytest.mark.exhaustive
def test_it_passes_conformance(installed):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c",
         str(ROOT / "pyproject.toml"), "-k", CHECKS, str(PLUGIN / "tests")],
        cwd=installed.parent, env=os.environ | CPU | {"PYTHONPATH": str(installed)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
