"""A step under FSDP that an exception cuts short: everything is freed, and the next step is right.

Every rank fails alike, in the forward, in the backward or between them. What happens when one rank
fails is the same machinery as under ZeRO, and tested there.
"""

import functools
import itertools

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.sharding.gradients import UnitGradients
from drivetrain.testing.conformance.twins import Twins
from drivetrain.testing.models import Case, numbers, squared_error
from towers import Tower

STRATEGIES = {
    "full": {"live_units": 2},
    "three": {"live_units": 3},
    "kept": {"reshard_after_forward": False},
    "grad": {"sharding": "grad"},
    "local": {"accumulate": "local"},
}
ERRORS = {"error": RuntimeError("sprung"), "interrupt": KeyboardInterrupt("sprung")}
WINDOW = 2


NET = Case(name="net", factory=functools.partial(Tower, 4), batch=numbers, loss=squared_error)


def spring(model, where, error):
    """Let an exception fly in the forward of a layer inside of a block, or in its backward."""

    def forward(*_):
        raise error

    layer = model.blocks[2].down
    if where == "before":
        return layer.register_forward_pre_hook(forward)
    if where == "after":
        return layer.register_forward_hook(forward)
    if where == "backward":
        return layer.register_full_backward_hook(forward)
    return model.blocks[1].up.weight.register_hook(forward)


def units_of(twins):
    return twins.accelerator.strategy_of(twins.model).placement.units


def assert_freed(twins):
    whole = [unit.label for unit in units_of(twins) if unit.live_bytes]
    assert not whole, f"still whole: {whole}"


def window(accelerator, twins, step):
    """Train one window of micro-batches on both."""
    for micro in range(WINDOW):
        with accelerator.accumulate(twins.model):
            twins.backward(WINDOW * step + micro)
            twins.optimizer.step()
            twins.optimizer.zero_grad()
    assert_freed(twins)
    for parameter in twins.twin.parameters():
        parameter.grad /= WINDOW
    twins.twin_optimizer.step()
    twins.twin_optimizer.zero_grad()


def interrupted_runs(strategy):
    accelerator = Accelerator(
        strategy={"name": "fsdp", "unit_from": 10, **strategy},
        cpu=True,
        gradient_accumulation_steps=WINDOW,
    )
    twins = Twins(accelerator, NET)
    window(accelerator, twins, 0)
    wheres = ("before", "after", "backward", "gradient")
    for step, (where, error) in enumerate(itertools.product(wheres, ERRORS.values()), 1):
        handle = spring(twins.model, where, error)
        with pytest.raises(type(error), match="sprung"), accelerator.accumulate(twins.model):
            accelerator.backward(NET.loss(twins.model, numbers(99, twins.axis.rank)))
        handle.remove()
        twins.optimizer.optimizer.zero_grad()  # as a script does that gives the window up
        twins.model.zero_grad()
        accelerator.gradient_state.sync_gradients = True
        if step % 3 == 0:
            twins.model.eval()
            with torch.no_grad():
                twins.loss(7)
            twins.model.train()
            if strategy.get("sharding") != "grad":  # which keeps them until a step
                assert_freed(twins)
        window(accelerator, twins, step)
        twins.check()
    accelerator.free_memory()


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.ranks(2)
def test_the_next_step_is_right(strategy):
    interrupted_runs(STRATEGIES[strategy])


@pytest.mark.parametrize("accumulate", ["reduce", "local"])
@pytest.mark.ranks(4)
def test_the_next_step_of_replicas_is_right(accumulate):
    interrupted_runs({"sharding": "hybrid", "shard_size": 2, "accumulate": accumulate})


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_replicas_that_are_not_equally_fast(monkeypatch):
    """What a round cut short sends does not depend on which reductions were seen to be over."""

    def done(gradients):
        if torch.distributed.get_rank() >= 2:
            return False  # until backward ends
        gradients.reduction.wait()
        return True

    monkeypatch.setattr(UnitGradients, "done", property(done))
    interrupted_runs({"sharding": "hybrid", "shard_size": 2})


@pytest.mark.ranks(2)
def test_what_is_freed_at_once():
    """After an exception in forward nothing is whole; after one in backward, or after an interrupt,
    which skips hooks, the next use or the clearing of gradients frees the rest."""
    for strategy in ({}, {"sharding": "grad"}):
        accelerator = Accelerator(strategy={"name": "fsdp", "unit_from": 10, **strategy}, cpu=True)
        twins = Twins(accelerator, NET)
        for where, error in itertools.product(("before", "backward"), ERRORS.values()):
            handle = spring(twins.model, where, error)
            with pytest.raises(type(error), match="sprung"):
                accelerator.backward(NET.loss(twins.model, numbers(99, twins.axis.rank)))
            handle.remove()
            if where == "before" and isinstance(error, RuntimeError) and not strategy:
                assert_freed(twins)
            twins.optimizer.zero_grad()
            twins.model.eval()
            with torch.no_grad():
                NET.loss(twins.model, numbers(3, 0))
            twins.model.train()
            twins.optimizer.step()
            assert_freed(twins)
        accelerator.free_memory()
