"""A job of a real SLURM on two hosts: preempted, requeued, and equal to the job left in peace."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster_packages import cluster, fetched, slurm_variables, slurm_words, wait_for_slurm
from emulated_hosts import Hosts, why_not
from faulty_trainings import SCRIPT as TRAINING
from waits import PATIENCE_S

pytestmark = [pytest.mark.alone, pytest.mark.exhaustive]

STEPS, NOTICE_AFTER = 40, 8
SCRIPT = TRAINING.format(
    faults="    if point == 'step':\n        time.sleep(0.1)", steps=STEPS, every=STEPS + 1
)
"""It saves when it hears the notice alone."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    packages = tmp_path_factory.mktemp("packages")
    if reason := fetched(packages):
        pytest.skip(reason)
    with cluster(packages, tmp_path_factory.mktemp("hosts")) as hosts:
        wait_for_slurm(hosts)
        yield hosts


@dataclass(frozen=True)
class Job:
    """A job that was submitted.

    Attributes:
        slurm: its cluster.
        number: as SLURM names it.
        log: its output.
        folder: for its results.
    """

    slurm: Hosts
    number: str
    log: Path
    folder: Path

    @property
    def state(self) -> str:
        found = [word for word in self._facts().split() if word.startswith("JobState=")]
        return found[0].removeprefix("JobState=") if found else "unknown"

    @property
    def steps(self) -> list[str]:
        """A line for each step of the training."""
        path = self.folder / "losses"
        return path.read_text().splitlines() if path.exists() else []

    def wait_until(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait as long as the job takes steps or prints now and then."""
        seen, since = self._printed(), time.monotonic()
        while not reached():
            time.sleep(0.2)
            if (now := self._printed()) != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > PATIENCE_S:
                texts = [self._facts(), *seen, slurm_words(self.slurm)]
                pytest.fail("\n".join([f"not {what}; nothing new for {PATIENCE_S:g} s:", *texts]))

    def _printed(self) -> tuple[str, ...]:
        text = self.log.read_text() if self.log.exists() else "no output"
        return text, *self.steps[-1:]

    def _facts(self) -> str:
        asked = ["scontrol", "show", "job", self.number]
        return self.slurm[0].run(asked, env=environment(self.slurm))[1]


@pytest.fixture
def submitted(slurm, tmp_path) -> Callable[[str], Job]:
    """Submit the job file of the script with a folder for its results."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def submit(folder: str) -> Job:
        (tmp_path / folder).mkdir()
        options = ("--set", "launch.nnodes=2", "--set", "launch.nproc_per_node=1")
        subprocess.run(
            [
                *(sys.executable, "-m", "drivetrain_launch", "manifest", "slurm", *options),
                *("--devices", "0", "--set", "launch.device=cpu", "--output", f"{folder}.sbatch"),
                *("train.py", folder),
            ],
            cwd=tmp_path,
            check=True,
        )
        code, text = slurm[0].run(
            ["sbatch", "--parsable", f"{folder}.sbatch"], folder=tmp_path, env=environment(slurm)
        )
        assert code == 0, text
        number = text.strip()
        return Job(slurm, number, tmp_path / f"train-{number}.out", tmp_path / folder)

    return submit


def environment(slurm: Hosts) -> dict[str, str]:
    """Return an environment in which SLURM and this interpreter's ``drivetrain`` are found."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/usr/sbin:/bin:/sbin"
    return slurm_variables(slurm) | {"PATH": path, "OMP_NUM_THREADS": "1"}


def test_a_preempted_job_is_requeued_and_ends_as_if_nothing_had_happened(slurm, submitted, took):
    calm = submitted("calm")
    calm.wait_until("completed", lambda: calm.state == "COMPLETED")
    job = submitted("disturbed")
    job.wait_until("training", lambda: len(job.steps) >= NOTICE_AFTER)
    begin = time.monotonic()
    code, text = slurm[0].run(["scancel", "--signal=USR1", job.number], env=environment(slurm))
    assert code == 0, text
    job.wait_until("requeued", lambda: job.state == "PENDING")
    took("F9", "with SLURM: saved and requeued", time.monotonic() - begin)
    saved = len(job.steps)
    assert NOTICE_AFTER <= saved < STEPS
    job.wait_until("completed", lambda: job.state == "COMPLETED")
    assert job.steps[saved].startswith(f"{saved + 1} ")
    assert len(job.steps) == STEPS
    weights, expected = ((each.folder / "weights").read_bytes() for each in (job, calm))
    assert weights == expected
    job.wait_until("without processes", lambda: not left_behind())


def left_behind() -> list[str]:
    """Return the processes of the jobs that are still there."""
    asked = ["pgrep", "-af", "train.py (calm|disturbed)"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
