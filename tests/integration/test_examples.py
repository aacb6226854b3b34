"""The examples run as their first lines say, alone and on two ranks, and resume."""

import re
from pathlib import Path

import pytest

from forked_programs import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = ("-m", "drivetrain_launch", "launch", "--nproc-per-node")
TINY = (
    "--max-bytes", "60000", "--dim", "16", "--layers", "1", "--heads", "2", "--batch", "4",
    "--length", "32", "--eval-every", "2", "--save-every", "2", "--output", "run",
)  # fmt: skip


@pytest.fixture
def python(tmp_path):
    """Run this interpreter on the CPU in a folder of its own; the program must end well."""

    def run(*arguments: str) -> str:
        done = run_python(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_minimal_is_a_page():
    text = (EXAMPLES / "minimal.py").read_text()
    assert len(text.splitlines()) <= 25
    assert text.count("# (+)") == 4


def test_gpt_trains_saves_and_resumes_where_it_was(python, tmp_path):
    script = (*LAUNCH, "2", str(EXAMPLES / "train_gpt.py"), *TINY)
    whole = python(*script, "--steps", "4")
    assert re.search(r"held-out loss \d\.\d+ nats per byte after 4 steps", whole)
    assert "sample:\ndef " in whole
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint_0", "checkpoint_1"]
    resumed = python(*script, "--steps", "6", "--resume")
    assert "resumed at step 4" in resumed
    assert "after 6 steps" in resumed
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint_1", "checkpoint_2"]
