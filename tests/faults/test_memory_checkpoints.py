"""A launched run goes on from its host's memory, and its launcher leaves nothing there."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from faulty_trainings import STEPS
from forked_programs import run_python
from waits import wait_until

pytestmark = pytest.mark.exhaustive

MEMORY = ("--set", "checkpoint.local=memory", "--set", "checkpoint.local_every=2")
RESTARTS = (*MEMORY, "--max-restarts", "2")
TOLD = "rank == 0 and open(f'{name}/memory', 'a').write(os.environ['DRIVETRAIN_MEMORY'] + chr(10))"
"""Writes down where the memory is."""

WAIT = "accelerator.wait_for_checkpoint()"
"""Lets each save end before the next step: otherwise a fast loop has fewer of them."""

KILL = "rank == 1 and os.kill(os.getpid(), signal.SIGKILL)"
TORN = (
    "setattr(sys.modules['drivetrain.checkpoint.local'], 'write_common', "
    "lambda *given: os.kill(os.getpid(), signal.SIGKILL))"
)
NEVER = STEPS + 1


def memory_of(trainings, name="run") -> list[Path]:
    path = trainings.folder / name / "memory"
    return list(map(Path, path.read_text().split())) if path.exists() else []


@pytest.fixture
def clean(trainings) -> bytes:
    """The final weights of a run without faults and without memory."""
    assert trainings.run("clean", every=NEVER).returncode == 0
    return trainings.weights("clean")


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_in_memory_alone(trainings, clean):
    faults = {"start": TOLD, "step": f"{WAIT}; step == 8 and once(f'killed-{{rank}}') and {KILL}"}
    ended = trainings.run("run", *RESTARTS, faults=faults, every=NEVER)
    assert ended.returncode == 0, ended.stderr
    assert [step for step, _ in trainings.losses()] == [*range(1, 8), *range(7, STEPS + 1)]
    assert trainings.weights() == clean
    assert trainings.checkpoints() == []
    assert "going on from step 6, out of the memory of the hosts (nothing is in storage" in (
        ended.stderr
    )
    first, second = memory_of(trainings)
    assert first == second
    assert not first.exists()


def test_a_rank_killed_while_it_saves_falls_back_to_the_checkpoint_before(trainings, clean):
    fault = f"{WAIT}; step == 6 and rank == 0 and once('torn') and {TORN}"
    ended = trainings.run("run", *RESTARTS, faults={"step": fault}, every=NEVER)
    assert ended.returncode == 0, ended.stderr
    assert "going on from step 4, out of the memory of the hosts" in ended.stderr
    assert trainings.weights() == clean


def test_a_newer_checkpoint_in_storage_counts(trainings, clean):
    fault = f"{WAIT}; step == 10 and once(f'killed-{{rank}}') and {KILL}"
    options = [text.replace("every=2", "every=5") for text in RESTARTS]
    ended = trainings.run("run", *options, faults={"step": fault}, every=4)
    assert ended.returncode == 0, ended.stderr
    assert "going on from step 8, out of storage" in ended.stderr
    assert trainings.weights() == clean


BROKEN = """
        if step == 9 and rank == 0 and once("broken"):
            for path in Path(name, "checkpoints").glob("*/model-*"):
                if "checkpoint_0" not in str(path) or {every} == 8:
                    path.write_bytes(path.read_bytes()[:-1] + b"\\x01")
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""The checkpoint in storage after step 8 is damaged."""


@pytest.mark.parametrize("every", [4, 8], ids=["an older one", "no other"])
def test_memory_goes_before_an_older_one_than_the_damaged_one_in_storage(trainings, clean, every):
    options = [text.replace("every=2", "every=3") for text in RESTARTS]
    faults = {"step": f"{WAIT}{BROKEN.format(every=every)}"}
    ended = trainings.run("run", *options, faults=faults, every=every)
    assert ended.returncode == 0, ended.stderr
    found = "storage has step 4" if every == 4 else "nothing is in storage that can be read"
    assert f"going on from step 6, out of the memory of the hosts ({found});" in ended.stderr
    assert trainings.weights() == clean


FULL = """
        def full(*given):
            raise OSError(28, "No space left on device", "a file")
        saving = sys.modules["drivetrain.checkpoint.local"]
        if step == 5 and rank == 1:
            saving.real, saving.exchange = saving.exchange, full
        if step == 7 and rank == 1:
            saving.exchange = saving.real
"""
"""The memory of a rank is full in the save after step 6."""

DAMAGE = """
        if step == 8 and rank == 0 and once("damaged"):
            for path in Path(os.environ["DRIVETRAIN_MEMORY"]).glob("*/*/model-*"):
                path.write_bytes(path.read_bytes()[:-1] + b"\\x01")
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_save_that_fails_costs_that_checkpoint_and_not_the_run(trainings, clean):
    kill = f"step == 10 and once(f'killed-{{rank}}') and {KILL}"
    faults = {"step": f"{WAIT}{FULL}        {kill}"}
    ended = trainings.run("run", *RESTARTS, faults=faults, every=NEVER)
    assert ended.returncode == 0, ended.stderr
    assert "rank 1: No space left on device: a file; the run goes on without" in ended.stderr
    assert "going on from step 8, out of the memory of the hosts" in ended.stderr
    assert trainings.weights() == clean


def test_a_damaged_checkpoint_in_memory_alone_is_an_error_and_no_new_run(trainings):
    faults = {"start": TOLD, "step": f"{WAIT}{DAMAGE}"}
    ended = trainings.run("run", *RESTARTS, faults=faults, every=NEVER)
    (folder,) = set(memory_of(trainings))
    try:
        assert ended.returncode == 4, ended.stderr
        assert [step for step, _ in trainings.losses()] == [*range(1, 8)]
        assert f"{folder}/0/checkpoint_" in ended.stderr
        assert len(list(folder.glob("0/checkpoint_*/manifest.json"))) == 2
        assert trainings.run("next", *MEMORY, every=NEVER).returncode == 0
        assert not folder.exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("end", ["failure", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_in_memory_after_any_end(trainings, end):
    wait = f"{WAIT}; step == 4 and Path(name, 'waits').touch()"
    faults = {"start": TOLD, "step": wait, "update": "step > 3 and __import__('time').sleep(1)"}
    if end == "failure":
        faults["update"] = "step == 5 and rank == 1 and 1 / 0"
    with trainings.start("run", *MEMORY, faults=faults, every=NEVER) as training:
        wait_until((trainings.folder / "run" / "waits").exists, "in memory")
        (folder,) = memory_of(trainings)
        if end != "failure":
            assert folder.stat().st_mode & 0o777 == 0o700
            assert [path.name for path in folder.glob("0/checkpoint_*")]
            os.kill(training.pid, signal.Signals[end])
        ended = training.wait()
    if end == "SIGKILL":  # nobody could; the next launcher on this host does
        assert folder.exists()
        trainings.left()
        assert len(list(trainings.temporary.glob("drivetrain-launch-*"))) == 1  # its other folder
        assert trainings.run("next", *MEMORY, every=NEVER).returncode == 0
    else:
        assert ended.returncode == {"failure": 1, "SIGTERM": 75}[end]
    assert not folder.exists()


TWO = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from drivetrain import Accelerator

for kills in (2, 5):
    torch.manual_seed(kills)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(12, 4), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    for row in loader if optimizer.steps < 6 else ():
        accelerator.wait_for_checkpoint()
        if optimizer.steps == kills and sys.argv[1:] and not os.path.exists(f"{kills}"):
            os.mkdir(f"{kills}")
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward(model(row).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(optimizer.steps, model.weight.sum().item().hex())
"""


def test_each_accelerator_of_a_script_finds_its_own(trainings):
    (trainings.folder / "two.py").write_text(TWO)
    every = ("--set", "checkpoint.local=memory", "--set", "checkpoint.local_every=1")
    launch = ("-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node", "2")
    options = (*launch, "--max-restarts", "3", *every)
    said = {
        tuple(run_python(*options, "two.py", *kill, folder=trainings.folder).stdout.split()[-4:])
        for kill in ([], ["kill"])
    }
    ((one, first, other, second),) = said
    assert (one, other) == ("6", "6")
    assert first != second


def test_memory_without_a_launcher_is_refused(trainings):
    script = trainings.folder / "alone.py"
    script.write_text(
        "from drivetrain import Accelerator\n"
        "Accelerator(cpu=True, config={'checkpoint': {'local': 'memory'}})\n"
    )
    ended = run_python("alone.py", folder=trainings.folder)
    assert ended.returncode != 0
    assert "memory needs a launcher that keeps the memory" in ended.stderr
