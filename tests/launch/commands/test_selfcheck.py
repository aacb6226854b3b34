"""``drivetrain test``: passes where ranks train correctly, and notices where they do not."""

import pytest
import torch

from drivetrain_launch.commands import launch as check
from drivetrain_launch.commands import selfcheck
from drivetrain_launch.commands.selfcheck import compare
from forked_programs import run_python


@pytest.mark.exhaustive
def test_self_check_passes_on_two_ranks(sandbox):
    done = sandbox.run("test", "--strategy", "toy", "--cpu", "--nproc-per-node", "2")
    assert done.stdout.startswith("ok: 2 ranks on cpu and one process differ by ")


@pytest.mark.exhaustive
def test_self_check_notices_a_strategy_that_does_not_average(sandbox):
    sandbox.script(
        "from toy_spread import Toy\n"
        "class Broken(Toy):\n"
        "    def backward(self, loss, **options): loss.backward(**options)\n",
        "broken.py",
    )
    sandbox.install("broken", {"broken": "Broken"})
    env = sandbox.environment()
    env["PYTHONPATH"] += f":{sandbox.folder}"
    words = ("-m", "drivetrain_launch", "test", "--strategy", "broken", "--cpu")
    done = run_python(*words, folder=sandbox.folder, env=env)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("MISMATCH: 2 ranks on cpu and one process differ by ")


def test_ranks_are_those_of_the_configuration_and_else_two(command, tmp_path, monkeypatch):
    found = []

    def launched(resolved, *rest):
        found.append(resolved.run.launch.nproc_per_node)
        return 0

    monkeypatch.setattr(check, "launch", launched)
    (tmp_path / "run.yaml").write_text("strategy: toy\nlaunch: {nproc_per_node: 4}\n")
    for words in (("--config", "run.yaml"), ("--set", "launch.nproc_per_node=3"), ()):
        command.output("test", "--cpu", *words)
    assert found == [4, 3, 2]


def test_comparison_takes_nan_and_missing_weights_for_a_mismatch(monkeypatch, capsys):
    good = {"losses": torch.zeros(2), "w": torch.ones(3)}
    assert compare(good, good) == 0
    assert compare(good, {"losses": torch.zeros(2)}) == float("inf")
    assert compare(good, good | {"losses": torch.tensor([0.0, float("nan")])}) == float("inf")
    assert compare(good, good | {"losses": torch.zeros(1)}) == float("inf")
    assert compare(good, good | {"w": torch.ones(3) + 0.25}) == 0.25
    selfcheck.main()
    assert capsys.readouterr().out.startswith("ok: 1 ranks on ")

    def trained_wrongly(accelerator):
        right = selfcheck.train_alone(1, accelerator.device)
        return right | {"0.bias": right["0.bias"] + 1e-3}

    monkeypatch.setattr(selfcheck, "train_spread", trained_wrongly)
    with pytest.raises(SystemExit) as ended:
        selfcheck.main()
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("MISMATCH: 1 ranks on ")
