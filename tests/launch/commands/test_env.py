"""``drivetrain env``: the facts of this machine, and no secret among them."""

import json

import torch

import drivetrain
from drivetrain_launch.commands.env import shown_variables


def test_env_describes_the_machine(command):
    facts = json.loads(command.output("env", "--json"))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["drivetrain"] == drivetrain.__version__
    assert "toy" in facts["plugins"]["drivetrain.strategies"]
    assert facts["versions"]["numpy"][0].isdecimal()
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["processor"]
    assert facts["machine"]["memory for this process"].endswith("iB")
    assert command.output("env").startswith("### versions\n\n- drivetrain: ")


def test_env_shows_known_variables_and_no_secret(command, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    _, out, _ = command("env")
    assert "- NCCL_DEBUG: INFO" in out
    assert "canary" not in out
    words = ["API_KEY", "AUTH", "BEARER", "CREDENTIALS", "DSN", "PASS", "PW", "SECRET", "TOKEN"]
    secrets = {f"DRIVETRAIN_{word}": "x" for word in words}
    shown = {f"{family}_A": "z" for family in ("DRIVETRAIN", "GLOO", "NCCL", "OMP", "TORCH")}
    assert shown_variables({**secrets, "PATH": "y", **shown}) == shown
