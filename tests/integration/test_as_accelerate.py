"""A script for Accelerate runs as it is: its own modules see drivetrain, libraries the real one."""

import subprocess
from pathlib import Path

import pytest

from forked_programs import run_python

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "as_accelerate.py"
LAUNCH = ("drivetrain_launch", "launch", "--cpu", "--nproc-per-node", "2")


@pytest.fixture
def library(tmp_path) -> str:
    """Install a library that uses accelerate, and return its folder."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "library.py").write_text("from accelerate import Accelerator\n")
    return str(installed)


def run(*words: str | Path, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", *map(str, words), folder=folder, env=env)


def test_a_launched_script_sees_drivetrain_and_a_library_the_real_package(tmp_path, library):
    env = {"PYTHONPATH": library, "LIBRARY": "library"}
    done = run(*LAUNCH, "--as-accelerate", SCRIPT, "--project", tmp_path, folder=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    rate, loss, version, seen = done.stdout.splitlines()
    # 4 windows of 2 ranks: all 8 steps of the schedule, as scripts for Accelerate count them.
    assert rate == "rate 0.0 ranks [0, 1]"
    assert loss.startswith("loss 0.")
    assert version == "accelerate 1.15.0 True"
    assert seen == "helper True, library accelerate.accelerator"


def test_an_installed_package_that_is_named_sees_drivetrain(tmp_path, library):
    (tmp_path / "train.py").write_text(
        "import sys, library\nprint(library.Accelerator.__module__, *sys.argv)\n"
    )
    words = (*LAUNCH[:-1], "1", "--as-accelerate=other,library", "train.py", "--as-accelerate", "x")
    done = run(*words, folder=tmp_path, PYTHONPATH=library)
    assert done.stdout == "drivetrain.compat.accelerator train.py --as-accelerate x\n", done.stderr
    words = (*LAUNCH, "--as_accelerate", "train.py")
    done = run(*words, folder=tmp_path, PYTHONPATH=library)
    assert done.stdout.startswith("accelerate.accelerator train.py"), done.stderr
    assert "--as-accelerate=PACKAGE" in done.stderr


@pytest.mark.exhaustive
def test_a_module_runs_without_the_launcher(tmp_path):
    words = ("drivetrain.compat", "-m", "as_accelerate", "--project", tmp_path)
    done = run(*words, folder=SCRIPTS)
    assert done.returncode == 0, done.stderr
    assert "helper True, library accelerate.accelerator" in done.stdout
