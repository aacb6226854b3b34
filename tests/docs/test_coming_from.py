"""The scripts of the pages "Coming from ..." print the same loss before and after the change."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_launch.cli import run

FOLDER = Path(__file__).parents[2] / "docs/coming-from"
PAGES = ("accelerate.md", "deepspeed.md", "torchrun.md")

RUN_ALL = """
import contextlib, io, json, os, pathlib, time

os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each script meets at a port of its own
losses = {}
for name, port, script in json.loads(pathlib.Path("scripts.json").read_text()):
    os.environ["MASTER_PORT"] = str(port)
    printed, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        exec(compile(script, name, "exec"), names)
    time.sleep(0.2)  # torch's DDP waits forever if it is freed while gloo lets go of the last work
    del names
    losses[name] = printed.getvalue().split()
if os.environ["RANK"] == "0":
    pathlib.Path("losses.json").write_text(json.dumps(losses))
"""
"""Runs all scripts on the same ranks: they import torch once."""


def block(page: str, language: str) -> str:
    """Return the only block of a language of a page."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", (FOLDER / page).read_text(), re.M | re.S)
    return text


def side(page: str, sign: str) -> str:
    """Return the script of a page as it is on the side of the lines with a sign."""
    lines = block(page, "diff").splitlines()
    return "\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign)) + "\n"


def scripts() -> dict[str, str]:
    """Return all scripts that can run here, by name."""
    found = {f"{page} {sign}": side(page, sign) for page in PAGES for sign in "-+"}
    # The engine of DeepSpeed is not installed: DDP's script with its clipping trains the same.
    found["deepspeed.md -"] = found["torchrun.md -"].replace(
        "        optimizer.step()",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()",
    )
    return found


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The words that each script printed on two ranks, configured as on DeepSpeed's page."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "ds_config.json").write_text(block("deepspeed.md", "json"))
    config = str(folder / "drivetrain.yaml")
    assert run(["config", "import", str(folder / "ds_config.json"), "--output", config]) == 0
    found = scripts()
    entries = zip(found, free_ports(len(found)), found.values(), strict=True)
    (folder / "scripts.json").write_text(json.dumps(list(entries)))
    (folder / "all.py").write_text(RUN_ALL)
    launch = ["launch", "--config", config, "--cpu", "--nproc-per-node", "2", "all.py"]
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain_launch", *launch],
        cwd=folder,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_before_and_after_print_the_same_loss(losses, page):
    (before,), (after,) = losses[f"{page} -"], losses[f"{page} +"]
    assert float(after) == pytest.approx(float(before), abs=2e-4)


def test_losses_are_those_of_training(losses):
    """Clipping changes the numbers, so a script that did not train would show."""
    numbers = {float(loss) for (loss,) in losses.values()}
    assert len(numbers) >= 2
    assert all(0 < number < 5 for number in numbers)


@pytest.mark.parametrize("sign", ["-", "+"])
@pytest.mark.parametrize("page", PAGES)
def test_each_side_is_a_whole_script(page, sign):
    compile(side(page, sign), page, "exec")


def test_json_of_deepspeed_gives_its_stage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(block("deepspeed.md", "json"))
    assert run(["config", "import", "ds_config.json"]) == 0
    stage = json.loads(block("deepspeed.md", "json"))["zero_optimization"]["stage"]
    assert f"name: zero{stage}" in capsys.readouterr().out
