"""A strategy from another distribution is found, offered, launched and tested like our own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked_programs

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "third_party_plugin"
MINIMAL = str(ROOT / "examples" / "minimal.py")
CHECKS = (
    "ranks2 and (mixed_dtypes or tied or global_norm or cost_equals_ledger or bit_by_bit"
    " or evaluation_is_the_same)"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the example into a folder of its own, offline, and return the folder."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "plugin"
    # A copy is built: nothing may be left in the tree.
    subprocess.run(["cp", "-r", str(PLUGIN), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(folder), str(source)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def python(installed, tmp_path):
    """Run this interpreter with the plugin on its path."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_plugin_takes_part_in_plans(python):
    """Its one all-reduce hides behind nothing, so ddp is quicker; otherwise they are alike."""
    sizes = "layers=4,hidden=1024,heads=16,seq=1024"
    where = ("--gpt", sizes, "--batch", "16", "--hardware", "a100-80gb", "--json")
    plan = ("-m", "drivetrain_launch", "plan", *where)
    found = {}
    for name in ("flat", "ddp"):
        done = python(*plan, "--layout", f"micro_batch=2,data_parallel={name}")
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout)
    assert found["flat"]["strategy"] == "flat"
    assert found["flat"]["sent"]["dp"] == found["ddp"]["sent"]["dp"]
    assert found["flat"]["held"] == found["ddp"]["held"]
    assert found["flat"]["step_seconds"] > 1.01 * found["ddp"]["step_seconds"]
    done = python(*plan, "--devices-per-host", "1")
    assert done.returncode == 0, done.stderr
    assert any("data_parallel=flat" in each["layout"] for each in json.loads(done.stdout))


@pytest.fixture
def launch(installed, tmp_path):
    """Launch on two ranks with the plugin on the path."""
    env = {"PYTHONPATH": str(installed)}
    return lambda *words: forked_programs.launch(
        "--nproc-per-node", "2", *words, folder=tmp_path, env=env
    )


def test_launch_trains_with_it_as_with_another_strategy(launch):
    flat, ddp = (launch("--strategy", name, MINIMAL) for name in ("flat", "ddp"))
    assert flat.returncode == ddp.returncode == 0, flat.stderr + ddp.stderr
    assert len(flat.stdout.splitlines()) == 5
    assert flat.stdout == ddp.stdout


def test_help_has_its_line(python):
    help_text = python("-m", "drivetrain_launch", "launch", "--help").stdout
    assert "flat      one all-reduce of all gradients after backward" in help_text


def test_its_knob_changes_the_run(launch):
    summed = launch("--strategy", "flat", "--set", "strategy.mean=false", "--dry-run")
    assert summed.returncode == 0, summed.stderr
    assert "--set strategy.mean=false" in summed.stdout


def test_it_is_in_the_list_of_an_unknown_name(launch):
    done = launch("--strategy", "flt", MINIMAL)
    assert done.returncode == 2
    assert "did you mean 'flat'?" in done.stderr
    assert "installed: auto, ddp, flat" in done.stderr


def test_the_wizard_offers_it_and_asks_its_question(python):
    code = (
        "import json\n"
        "from drivetrain.registry import strategies\n"
        "from drivetrain_launch.wizard.questions import STRATEGY_KEY, Wizard\n"
        "wizard = Wizard(strategies())\n"
        "while wizard.current.key != STRATEGY_KEY:\n"
        "    wizard.answer(wizard.current.default)\n"
        "titles = {c.value: c.title for c in wizard.current.choices}\n"
        "wizard.answer('flat')\n"
        "print(json.dumps([titles, wizard.current.key, wizard.current.text]))\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    titles, key, text = json.loads(done.stdout)
    assert {"ddp", "flat"} < set(titles)
    assert "one all-reduce" in titles["flat"]
    assert (key, text) == ("strategy.mean", "Average gradients over ranks?")


@pytest.mark.exhaustive
def test_it_passes_conformance(python):
    done = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
        "-k", CHECKS, str(PLUGIN / "tests"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
