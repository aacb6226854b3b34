"""What goes wrong in a step: the next step works, or every rank soon fails and says why.

The conformance suite covers a rank that dies, tests/core/collectives the order check by itself.
Here models with divided blocks, under ZeRO and FSDP, fail in the middle of forward and backward,
and ranks take different paths through them.
"""

import functools
import itertools

import pytest
import torch

from drivetrain.errors import CollectiveError
from drivetrain.parallel import reduce
from drivetrain.parallel.gradients import UnitGradients
from drivetrain.testing.conformance.suite import Twins
from drivetrain.testing.models import Case, numbers
from stacks import Tower
from zero_stages import FSDP, SHARDED, STAGES, assert_freed, each, evaluate, start, train_window

pytestmark = pytest.mark.ranks(2)

WAITING = {"launch": {"timeout_s": 3600.0}}
"""Far beyond a test's own limit: a rank that waits for it fails its test."""

ERROR, INTERRUPT = RuntimeError("sprung"), KeyboardInterrupt("sprung")
PLACES = (("before", ERROR), ("after", INTERRUPT), ("backward", INTERRUPT), ("earlier", ERROR))
HYBRID = {**FSDP, "sharding": "hybrid", "shard_size": 2}
NET = Case("net", functools.partial(Tower, 4))


def fail(twins, where, error):
    """Let an exception fly in the forward of a layer inside of a block, or in its backward."""

    def spring(*_):
        raise error

    layer = twins.model.blocks[2].down
    register = {
        "before": layer.register_forward_pre_hook,
        "after": layer.register_forward_hook,
        "backward": layer.register_full_backward_hook,
        "earlier": twins.model.blocks[1].up.register_full_backward_pre_hook,
    }
    handle = register[where](spring)
    with pytest.raises(type(error), match="sprung"):
        twins.accelerator.backward(NET.loss(twins.model, numbers(99, twins.axis.rank)))
    handle.remove()


def interrupted_run(strategy):
    accelerator = start(strategy, gradient_accumulation_steps=2)
    twins = Twins(accelerator, NET)
    train_window(twins, 0, 2)
    for step, (where, error) in enumerate(PLACES, 1):
        with accelerator.accumulate(twins.model):
            fail(twins, where, error)
        twins.optimizer.optimizer.zero_grad()  # as a script does that gives the window up
        twins.model.zero_grad()
        accelerator.gradient_state.sync_gradients = True
        if step % 2 == 0:
            evaluate(twins, 7)
            if strategy["name"] == "fsdp" and "sharding" not in strategy:  # others wait for a step
                assert_freed(twins)
        train_window(twins, step, 2)
        twins.check()


@each("sharded", "zero1", "fsdp", "fsdp kept", "grad")
def test_an_exception_on_every_rank(strategy):
    """What half a step left is cleared and freed, and the next steps are right."""
    interrupted_run(strategy)


@pytest.mark.parametrize("accumulate", ["reduce", "local"])
@pytest.mark.ranks(4)
def test_an_exception_on_every_replica(accumulate, monkeypatch):
    """Also where it is not at the same time that replicas see that their reductions are over."""

    def done(gradients):
        if torch.distributed.get_rank() >= 2:
            return False  # until backward ends
        gradients.reduction.wait()
        return True

    monkeypatch.setattr(reduce, "PATIENCE_S", 0.05)
    if accumulate == "reduce":
        monkeypatch.setattr(UnitGradients, "done", property(done))
    interrupted_run({**HYBRID, "accumulate": accumulate})


@each("zero2", "sharded")
def test_no_memory_for_what_crosses(strategy, monkeypatch):
    """A script that goes on loses no gradient of the unit that was about to be sent."""
    accelerator = start(strategy)
    twins = Twins(accelerator, NET)
    last, channel = accelerator.strategy_of(twins.model).reduce.units[-1], UnitGradients._channel

    def no_memory(unit):
        if unit is last:
            raise torch.OutOfMemoryError
        return channel(unit)

    with monkeypatch.context() as patch:
        patch.setattr(UnitGradients, "_channel", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            accelerator.backward(twins.loss(0))
    twins.backward_twin(0)
    twins.backward(1)
    twins.step()
    twins.check()


def test_what_is_freed_at_once():
    """After an exception in forward nothing is whole; after one in backward, or after an interrupt,
    which skips hooks, the next use or the clearing of gradients frees the rest."""
    for strategy in (FSDP, STAGES["grad"], {**FSDP, "accumulate": "local"}, SHARDED):
        accelerator = start(strategy)
        twins = Twins(accelerator, NET)
        for where, error in itertools.product(("before", "backward"), (ERROR, INTERRUPT)):
            fail(twins, where, error)
            if where == "before" and error is ERROR and strategy in (FSDP, SHARDED):
                assert_freed(twins)
            if error is ERROR:  # one script clears the gradients, another goes on
                twins.optimizer.zero_grad()
            with torch.no_grad():
                NET.loss(twins.model, numbers(3, 0))
            twins.optimizer.zero_grad()
            twins.optimizer.step()
            assert_freed(twins)


@pytest.mark.parametrize(
    ("mine", "theirs", "one", "other"),
    [
        ((0, 1, 2), (0, 1, 3), "blocks.2", "blocks.3"),
        ((0, 1), (0, 1, 2), None, "blocks.2"),
        ((0, 1, 2), (0, 2, 1), "blocks.1", "blocks.2"),
    ],
    ids=["another block", "one more block", "another order"],
)
def test_divided_blocks_on_different_paths(mine, theirs, one, other):
    """Both ranks fail soon, with an error that says which blocks each of them wanted."""
    accelerator = start(SHARDED, config=WAITING)
    twins = Twins(accelerator, NET)
    accelerator._weights.compare_first = lambda entry: None  # where all ranks would meet before
    twins.model.order = theirs if twins.axis.rank else mine
    with pytest.raises(CollectiveError, match="the ranks took different paths") as caught:
        accelerator.backward(NET.loss(twins.model, numbers(9, twins.axis.rank)))
    message = str(caught.value)
    for block, rank in ((one, 0), (other, 1)):
        assert f"rank {rank}" in message
        assert block is None or f"of {block})" in message, message
