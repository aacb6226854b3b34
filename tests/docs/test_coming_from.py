"""The scripts of the page "Coming from" print the same loss before and after the change."""

import json
from pathlib import Path

import pytest

from doc_pages import blocks
from drivetrain_launch.cli import run
from forked_programs import launch

PAGE = "docs/coming-from.md"
SCRIPTS = dict(zip(("accelerate", "deepspeed", "torchrun"), blocks(PAGE, "diff"), strict=False))

AT_ONCE = "import os, sys\nsys.stdout.flush()\nos._exit(0)\n"
"""Ends a script: torch's DDP sometimes waits forever where it is freed at the end of a process."""


def side(program, sign):
    """Return the script for a program as it is on the side of the lines with a sign."""
    lines = [line[1:] for line in SCRIPTS[program].splitlines() if line[:1] in ("", " ", sign)]
    return "\n".join(lines) + "\n" + (AT_ONCE if sign == "-" else "")


def loss(folder, script, config):
    """Return the loss that a script prints on two ranks."""
    (folder / "script.py").write_text(script)
    options = ["--config", config, "--cpu", "--nproc-per-node", "2"]
    done = launch(*options, "script.py", folder=folder, env={"ACCELERATE_USE_CPU": "1"})
    assert done.returncode == 0, script + done.stdout + done.stderr
    return float(done.stdout)


@pytest.mark.timeout(900)
def test_before_and_after_print_the_same_loss(tmp_path, monkeypatch, capsys):
    """All under the configuration that the JSON of DeepSpeed gives."""
    monkeypatch.chdir(tmp_path)
    (text,) = blocks(PAGE, "json")
    Path("ds_config.json").write_text(text)
    assert run(["config", "import", "ds_config.json", "--output", "drivetrain.yaml"]) == 0
    stage = json.loads(text)["zero_optimization"]["stage"]
    assert f"name: zero{stage}" in Path("drivetrain.yaml").read_text()
    scripts = {(program, sign): side(program, sign) for program in SCRIPTS for sign in "-+"}
    compile(scripts["deepspeed", "-"], "deepspeed", "exec")
    # The engine of DeepSpeed is not installed: DDP's script with its clipping trains the same.
    step = "        optimizer.step()"
    clip = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    scripts["deepspeed", "-"] = scripts["torchrun", "-"].replace(step, clip + step)
    losses = {which: loss(tmp_path, text, "drivetrain.yaml") for which, text in scripts.items()}
    for program in SCRIPTS:
        assert losses[program, "+"] == pytest.approx(losses[program, "-"], abs=2e-4), program
    # Clipping changes the numbers, so a script that did not train would show.
    assert len({round(number, 3) for number in losses.values()}) >= 2
    assert all(0 < number < 5 for number in losses.values())
