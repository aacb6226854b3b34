"""A script written for Accelerate runs after a change of imports, under every launcher, alike."""

from pathlib import Path

import pytest

from forked_programs import run_python

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_style.py"

LAUNCHERS = {
    "launch": ["-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "python": [],
}


def losses(launcher: str, folder: Path, *options: str) -> list[str]:
    """Run the script and return what it printed, once, from rank 0."""
    words = (*LAUNCHERS[launcher], str(SCRIPT), "--project", str(folder), *options)
    done = run_python(*words, folder=SCRIPT.parent)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert [line.split()[:2] for line in printed] == [["epoch", "0"], ["epoch", "1"]]
    assert float(printed[1].split()[-1]) < float(printed[0].split()[-1])
    return printed


def test_launch_runs_it_on_two_ranks(tmp_path):
    losses("launch", tmp_path / "run")


@pytest.mark.exhaustive
def test_torchrun_and_plain_python_run_it_too(tmp_path):
    assert losses("launch", tmp_path / "a") == losses("torchrun", tmp_path / "b")
    losses("python", tmp_path / "run", "--mixed_precision", "bf16")
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "checkpoints" / "checkpoint_2").exists()
