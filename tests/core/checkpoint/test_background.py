"""A save in the background: training goes on, values are those of the call, no error is lost."""

import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import Accelerator, ProjectConfiguration
from drivetrain.checkpoint import saving
from drivetrain.checkpoint.loading import open_checkpoint
from drivetrain.checkpoint.saving import Background, StagingBuffers
from drivetrain.errors import CheckpointError
from drivetrain.runtime.world import World


class Gate:
    """Holds every write of the last rank back until it is opened; the others wait for its verdict.

    They wait in a collective, which must not meet those of training.
    """

    def __init__(self, monkeypatch, accelerator):
        self.opened = threading.Event()
        real = saving.write_tensors

        def held(path, tensors):
            assert not accelerator.is_last_process or self.opened.wait(300)
            return real(path, tensors)

        monkeypatch.setattr(saving, "write_tensors", held)


def build(**options):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.ranks(2)
def test_values_are_those_of_the_call(tmp_path, monkeypatch):
    accelerator, model, optimizer = build()
    counter = nn.BatchNorm1d(2)  # registered state that changes after the call
    accelerator.register_for_checkpointing(counter)
    step(accelerator, model, optimizer)
    weight = model.weight.detach().clone()
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    gate = Gate(monkeypatch, accelerator)
    accelerator.save_state(tmp_path / "ck", wait=False)
    counter.running_mean.add_(1)
    for _ in range(3):  # with collectives of its own, while the other thread waits for the gate
        step(accelerator, model, optimizer)
    dist.barrier()
    assert not (tmp_path / "ck").exists()
    gate.opened.set()
    accelerator.wait_for_checkpoint()
    with open_checkpoint(tmp_path / "ck", accelerator.world) as found:
        assert torch.equal(found.model(0).read("weight"), weight)
        assert torch.equal(found.model(0).read("weight", "0.exp_avg"), moment)
        assert found.state["objects"][0]["running_mean"].tolist() == [0, 0]
    with pytest.raises(CheckpointError, match="already exists"):  # by the call itself
        accelerator.save_state(tmp_path / "ck", wait=False)
    accelerator.load_state(tmp_path / "ck")
    assert torch.equal(model.weight, weight)
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_next_save_load_and_end_wait_for_it(tmp_path):
    options = {"automatic_checkpoint_naming": True, "total_limit": 2}
    project = ProjectConfiguration(project_dir=tmp_path, **options)
    accelerator, model, optimizer = build(project_config=project, config={"report": False})
    for _ in range(4):
        step(accelerator, model, optimizer)
        accelerator.save_state(wait=False)
    assert accelerator.load_state().endswith("checkpoint_3")
    assert names(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]
    accelerator.save_state(wait=False)
    accelerator.end_training()
    assert names(tmp_path / "checkpoints") == ["checkpoint_3", "checkpoint_4"]
    open_checkpoint(tmp_path / "checkpoints" / "checkpoint_4", World())


@pytest.mark.ranks(2)
def test_a_file_that_grows_too_large_in_the_background(tmp_path):
    accelerator, _, _ = build()
    model = accelerator.prepare(nn.Linear(300, 300))
    accelerator.save_state(tmp_path / "ck")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    accelerator.wait_for_everyone()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        accelerator.save_state(tmp_path / "ck", overwrite=True, wait=False)
        with pytest.raises(CheckpointError, match=r"File too large: .*ck.*need \d+ bytes"):
            accelerator.wait_for_checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    accelerator.wait_for_everyone()
    assert names(tmp_path) == ["ck"]
    accelerator.load_state(tmp_path / "ck")
    assert model.weight.shape == (300, 300)
    accelerator.end_training()


SCRIPT = """
import sys, time, torch
from drivetrain import Accelerator
from drivetrain.checkpoint import saving
real = saving.write_tensors
def slowly(path, tensors):
    time.sleep(0.5)
    return real(path, tensors)
saving.write_tensors = slowly
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 3))
accelerator.save_state(sys.argv[1], wait=False)
if sys.argv[2] == "exit":
    sys.exit(0)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["exit", "end"])
def test_a_script_that_ends_without_waiting_completes_the_save(tmp_path, ranks, how):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "drivetrain_launch", "launch", "--cpu"]
    command += ["--nproc-per-node", str(ranks), str(tmp_path / "train.py")]
    command = command if ranks > 1 else [sys.executable, str(tmp_path / "train.py")]
    command += [str(tmp_path / "ck"), how]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "ck", World()).world_size == ranks


def test_the_failure_of_a_save_is_raised_once():
    def fail(group):
        raise CheckpointError("no room")

    background = Background(World())
    background.start(fail)
    with pytest.raises(CheckpointError, match="no room"):
        background.wait()
    background.start(lambda group: None)
    background.wait()


def test_the_next_save_uses_the_memory_of_the_last_one_again():
    buffers = StagingBuffers()
    tensors = [torch.arange(6.0).view(2, 3), torch.zeros(2, 3), torch.ones(4, dtype=torch.int64)]
    with buffers.copying() as copy:
        first = [copy(tensor) for tensor in tensors]
    places = {each.data_ptr() for each in first}
    assert len(places | {tensor.data_ptr() for tensor in tensors}) == 6
    for tensor in tensors:
        tensor.add_(7)
    with buffers.copying() as copy:
        second = [copy(tensor) for tensor in [*tensors, nn.Parameter(torch.ones(3))]]
    assert {each.data_ptr() for each in second[:3]} == places
    assert all(map(torch.equal, second, [*tensors, torch.ones(3)]))
    assert not any(each.requires_grad for each in second)
    with pytest.raises(RuntimeError, match="no memory"), buffers.copying() as copy:
        copy(tensors[0])
        raise RuntimeError("no memory")
    with buffers.copying() as copy:
        assert copy(tensors[0]).data_ptr() not in {first[0].data_ptr(), second[0].data_ptr()}


def faults_of_copies(buffers: StagingBuffers, tensors: list[torch.Tensor]) -> int:
    """Return how often the system had to give this thread a page while it copied."""
    with buffers.copying() as copy:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        copies = [copy(tensor) for tensor in tensors]
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert all(map(torch.equal, copies, tensors))
    return faults


def test_a_reserved_buffer_has_its_pages_before_the_first_copy():
    tensors = [torch.ones(2**24), torch.zeros(0), torch.tensor(1, dtype=torch.int64)]
    fresh, reserved = StagingBuffers(), StagingBuffers()
    reserved.reserve([(tensor.dtype, tensor.shape) for tensor in tensors])
    assert faults_of_copies(reserved, tensors) < faults_of_copies(fresh, tensors) / 4
    with reserved.copying() as copy:
        place = copy(tensors[0]).data_ptr()
    reserved.reserve([(torch.float32, torch.Size([3]))])  # a save has left its buffers already
    with reserved.copying() as copy:
        assert copy(tensors[0]).data_ptr() == place
