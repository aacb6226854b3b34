"""What save_state and load_state refuse, convert and keep besides the models."""

import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, CheckpointError, UsageError
from drivetrain.checkpoint.manifest import describe
from drivetrain.facade.checkpoints import RunCheckpoints
from drivetrain.runtime.world import World


def build(dtype=torch.float32, accumulation=1):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(dtype)
    model.register_buffer("seen", torch.tensor(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer):
    with accelerator.accumulate(model):
        x = torch.ones(2, 4, dtype=model[0].weight.dtype)
        accelerator.backward((model(x) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()


class Anything:
    """Has a state of any kind."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_another_dtype_is_converted_with_one_warning(tmp_path, caplog):
    for saved, loaded in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        first, model, optimizer = build(saved)
        step(first, model, optimizer)
        first.save_state(tmp_path / str(saved))
        second, fresh, other = build(loaded)
        torch.nn.init.zeros_(fresh[0].weight)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            second.load_state(tmp_path / str(saved))
            build(saved)[0].load_state(tmp_path / str(saved))  # nothing to say here
        (said,) = [record.getMessage() for record in caplog.records]
        assert f"converted: 4 from {saved} to {loaded}" in said
        assert fresh[0].weight.dtype is loaded
        assert torch.equal(fresh[0].weight, model[0].weight.to(loaded))
        moment = optimizer.state[model[0].weight]["exp_avg"]
        found = other.state[fresh[0].weight]["exp_avg"]
        assert torch.equal(found, moment.to(found.dtype))
        step(second, fresh, other)


def test_tied_names_and_steps_are_written_down(tmp_path):
    def tied():
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    accelerator, model, optimizer = tied()
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
    kept = Anything({"step": 3})
    accelerator.register_for_checkpointing(kept)
    accelerator.save_state(tmp_path / "ck")
    found = describe(tmp_path / "ck")
    assert found.manifest.aliases == ({"1.weight": "0.weight"},)
    assert found.steps == (2,)
    again, _, resumed = tied()
    again.register_for_checkpointing(kept)
    again.load_state(tmp_path / "ck")
    assert resumed.steps == 2
    again.free_memory()  # registered objects outlive it, as in Accelerate
    again.save_state(tmp_path / "objects")
    kept.state = None
    again.load_state(tmp_path / "objects")
    assert kept.state == {"step": 3}


def test_state_of_any_kind_with_a_codec_of_the_script(tmp_path):
    accelerator = Accelerator(cpu=True)
    plain, special = Anything({"a": 1}), Anything({"a": {1, 2, 3}})
    accelerator.register_for_checkpointing(plain)
    accelerator.register_for_checkpointing(special, encode=pickle.dumps, decode=pickle.loads)
    accelerator.save_state(tmp_path / "ck")
    assert (tmp_path / "ck" / "object-00001.encoded").exists()
    plain.state = special.state = None
    accelerator.load_state(tmp_path / "ck")
    assert plain.state == {"a": 1}
    assert special.state == {"a": {1, 2, 3}}
    other = Accelerator(cpu=True)
    other.register_for_checkpointing(plain, special)
    with pytest.raises(CheckpointError, match=r"object 1 \(Anything\) to have a codec, found none"):
        other.load_state(tmp_path / "ck")
    with pytest.raises(UsageError, match="expected encode and decode together, found encode"):
        other.register_for_checkpointing(plain, encode=pickle.dumps)
    with pytest.raises(UsageError, match=r"found without: argument 0 \(int\)"):
        other.register_for_checkpointing(3)
    other.register_for_checkpointing(Anything(1), encode=str, decode=str)
    with pytest.raises(CheckpointError, match="to return bytes for the state of Anything"):
        other.save_state(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.ranks(2)
def test_ranks_that_save_differently(tmp_path):
    accelerator, model, optimizer = build(accumulation=3)
    rank = accelerator.process_index
    for wait in (True, False):
        with pytest.raises(CheckpointError, match="on the directory: rank 0 has .*rank0, "):
            accelerator.save_state(tmp_path / f"rank{rank}", wait=wait)
        with pytest.raises(CheckpointError, match="ranks disagree on overwrite"):
            accelerator.save_state(tmp_path / "ck", wait=wait, overwrite=rank == 1)
        accelerator.wait_for_everyone()
        assert list(tmp_path.iterdir()) == []
    for _ in range(1 + rank):
        step(accelerator, model, optimizer)
    with pytest.raises(CheckpointError, match="micro-batches of the accumulation window: rank 0"):
        accelerator.save_state(tmp_path / "ck")
    accelerator.free_memory()
    accelerator, model, optimizer = build()
    step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "ck")
    if rank == 1:
        optimizer.steps += 1  # as if it had stepped once more than rank 0
    with pytest.raises(CheckpointError, match=r"optimizers have taken: rank 0 has \[1\], rank 1"):
        accelerator.save_state(tmp_path / "ck", overwrite=True)
    accelerator.load_state(tmp_path / "ck")
    accelerator.save_state(tmp_path / "ck", overwrite=True)
    accelerator.end_training()


def test_a_checkpoint_in_memory_looks_at_the_run_and_knows_the_newest_in_storage():
    done = []
    world, project = World(), SimpleNamespace(iteration=4)
    resumption = SimpleNamespace(before_save=lambda: done.append("resumption"), saved=bool)
    run = SimpleNamespace(
        state=SimpleNamespace(
            steps=3, world=world, project=project, resumption=resumption, models=[]
        ),
        finite=SimpleNamespace(before_save=lambda: done.append("finite")),
        saved=SimpleNamespace(contents=lambda entries, iteration: done.append(iteration)),
        background=SimpleNamespace(is_busy=False, wait=lambda: None),
        save_hooks={},
        _memory=SimpleNamespace(
            is_due=lambda steps: True, save=lambda steps, collect, saved: collect()
        ),
        _check_same_step=lambda: None,
    )
    RunCheckpoints.save_in_memory(run)
    assert done == ["finite", "resumption", 3]
