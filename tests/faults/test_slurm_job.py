"""A job of a real SLURM on two hosts: preempted, requeued, and equal to the job left in peace."""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_packages import cluster, fetched, slurm_variables, wait_for_slurm
from emulated_hosts import Hosts, why_not

STEPS, NOTICE_AFTER = 40, 8
SCRIPT = f"""
import sys, time
from pathlib import Path
import torch
from torch import nn
from drivetrain import Accelerator, ProjectConfiguration
torch.manual_seed(0)
folder = Path(sys.argv[1])
project = ProjectConfiguration(
    project_dir=str(folder / "run"), automatic_checkpoint_naming=True, total_limit=2
)
accelerator = Accelerator(project_config=project)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.randn(4 * {STEPS}, 8)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(rows), batch_size=2, shuffle=True
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
resumed = accelerator.resume()
steps = optimizer.steps
for (batch,) in loader:
    loss = model(batch).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if accelerator.is_main_process:
        with (folder / "steps").open("a") as file:
            file.write(f"{{resumed}} {{steps}}\\n")
    time.sleep(0.1)
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save(weights, folder / "weights.part")
    (folder / "weights.part").rename(folder / "weights.pt")
"""


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


@pytest.fixture
def submitted(slurm, tmp_path) -> Callable[[str], str]:
    """Submit the job file of the script with a folder for its results; return the job's number."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def submit(folder: str) -> str:
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
        return text.strip()

    return submit


def environment(slurm: Hosts) -> dict[str, str]:
    """Return an environment in which SLURM and this interpreter's ``drivetrain`` are found."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/usr/sbin:/bin:/sbin"
    return slurm_variables(slurm) | {"PATH": path, "OMP_NUM_THREADS": "1"}


def state(slurm: Hosts, job: str) -> str:
    _, text = slurm[0].run(["scontrol", "show", "job", job], env=environment(slurm))
    found = [word for word in text.split() if word.startswith("JobState=")]
    return found[0].removeprefix("JobState=") if found else text


def wait_until(what: str, reached: Callable[[], bool], log: Path, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            text = log.read_text() if log.exists() else "no output"
            pytest.fail(f"not {what} after {seconds:g} s:\n{text}")
        time.sleep(0.2)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.timeout(500)
def test_a_preempted_job_is_requeued_and_ends_as_if_nothing_had_happened(
    slurm, submitted, tmp_path
):
    calm = submitted("calm")
    log = tmp_path / f"train-{calm}.out"
    wait_until("completed", lambda: state(slurm, calm) == "COMPLETED", log)
    job = submitted("disturbed")
    log = tmp_path / f"train-{job}.out"
    steps = tmp_path / "disturbed/steps"
    wait_until("training", lambda: len(lines(steps)) >= NOTICE_AFTER, log)
    code, text = slurm[0].run(["scancel", "--signal=USR1", job], env=environment(slurm))
    assert code == 0, text
    wait_until("requeued", lambda: state(slurm, job) == "PENDING", log)
    saved = len(lines(steps))
    assert NOTICE_AFTER <= saved < STEPS
    # SLURM starts a requeued job two minutes later, unless told otherwise.
    slurm[0].run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=environment(slurm))
    wait_until("completed", lambda: state(slurm, job) == "COMPLETED", log)
    assert lines(steps)[saved] == f"True {saved + 1}"
    assert len(lines(steps)) == STEPS
    results = [(tmp_path / name / "weights.pt").read_bytes() for name in ("calm", "disturbed")]
    assert hashlib.sha256(results[0]).digest() == hashlib.sha256(results[1]).digest()
    wait_until("without processes", lambda: not left_behind(), log, seconds=10.0)


def left_behind() -> list[str]:
    """Return the processes of the jobs that are still there."""
    asked = ["pgrep", "-af", "train.py (calm|disturbed)"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
