"""``drivetrain env`` and ``drivetrain test``: what they say about this machine."""

import json

import torch

import drivetrain
from drivetrain_launch import selfcheck
from drivetrain_launch.env_command import cgroup_memory, shown_variables
from drivetrain_launch.selfcheck import Outcome, compare


def test_env_describes_the_machine(command):
    code, out, _ = command("env", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["drivetrain"] == drivetrain.__version__
    assert "toy" in facts["plugins"]["drivetrain.strategies"]
    assert facts["machine"]["cores"] >= 1
    code, out, _ = command("env")
    assert out.startswith("### versions\n\n- drivetrain: ")


def test_env_shows_known_variables_and_no_secret(command, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    _, out, _ = command("env")
    assert "- NCCL_DEBUG: INFO" in out
    assert "canary" not in out
    assert shown_variables({"TORCH_API_KEY": "x", "PATH": "y", "GLOO_A": "z"}) == {"GLOO_A": "z"}


def test_cgroup_limit_is_read_and_no_limit_is_said(tmp_path):
    for name, text in (("v1", "9223372036854771712\n"), ("max", "max\n"), ("v2", "2147483648\n")):
        (tmp_path / name).write_text(text)
    assert cgroup_memory((tmp_path / "v2",)) == "2.0 GiB"
    assert cgroup_memory((tmp_path / "v1", tmp_path / "max", tmp_path / "none")) == "none"


def test_self_check_passes_on_two_ranks(sandbox):
    done = sandbox.run("test", "--strategy", "toy", "--cpu", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: 2 ranks on cpu and one process differ by ")


def test_self_check_notices_a_strategy_that_does_not_average(sandbox):
    # A sitecustomize of our own breaks the strategy in every rank.
    broken = sandbox.folder / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        "    import toy_spread\n"
        "    toy_spread.Toy.backward = lambda self, loss, **options: loss.backward(**options)\n"
    )
    path = f"{broken}:{sandbox.environment()['PYTHONPATH']}"
    done = sandbox.run("test", "--strategy", "toy", "--cpu", env={"PYTHONPATH": path})
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("MISMATCH: 2 ranks on cpu and one process differ by ")


def test_comparison_takes_nan_and_missing_weights_for_a_mismatch():
    good = Outcome(torch.zeros(2), {"w": torch.ones(3)})
    assert compare(good, good) == 0
    assert compare(good, Outcome(torch.zeros(2), {})) == float("inf")
    assert compare(good, Outcome(torch.tensor([0.0, float("nan")]), good.weights)) == float("inf")
    assert compare(good, Outcome(torch.zeros(2), {"w": torch.ones(3) + 0.25})) == 0.25
    assert selfcheck.TOLERANCE < 0.25
