"""What goes wrong in a step under ZeRO: the next step works, or every rank soon fails and says why.

The conformance suite covers a rank that dies, tests/core/collectives the order check by itself.
Here models with divided blocks fail in the middle of forward and backward, and ranks take different
paths through them.
"""

import pytest
import torch

from drivetrain.errors import CollectiveError
from drivetrain.testing.conformance.twins import Twins
from drivetrain.testing.models import Case, numbers
from towers import Tower
from zero_stages import SHARDED, assert_freed, each, start, train_window

WAITING = {"launch": {"timeout_s": 3600.0}}
"""Far beyond a test's own limit: a rank that waits for it fails its test."""


class Trap(torch.autograd.Function):
    """Passes values on, and raises where it was told to."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.model.spring("backward")
        return gradient, None


class Net(Tower):
    """Four blocks, with a trap behind the second one; ``set`` arms it."""

    def __init__(self):
        super().__init__(4)
        self.set = None

    def spring(self, where):
        if self.set is not None and self.set[0] == where:
            raise self.set[1]

    def body(self, x):
        for i in self.order:
            x = self.blocks[i](x)
            if i == 1:
                self.spring("forward")
                x = Trap.apply(x, self)
        return x


NET = Case("net", Net)


@pytest.mark.parametrize("where", ["forward", "backward"])
@each("sharded", "zero1")
@pytest.mark.ranks(2)
def test_an_exception_on_every_rank(strategy, where):
    """What half a step left is cleared and freed, and the next steps are right."""
    accelerator = start(strategy, gradient_accumulation_steps=2)
    twins = Twins(accelerator, NET)

    train_window(twins, 0, 2)
    for again, error in enumerate((RuntimeError("sprung"), KeyboardInterrupt("sprung"))):
        twins.model.set = where, error
        with pytest.raises(type(error), match="sprung"):
            accelerator.backward(NET.loss(twins.model, numbers(9, twins.axis.rank)))
        twins.model.set = None
        if again:  # one script clears the gradients, another goes on to something else
            with torch.no_grad():
                NET.loss(twins.model, numbers(8, 0))
        twins.optimizer.zero_grad()
        if where == "forward" and not again:  # an interrupt skips hooks: the next step frees
            assert_freed(twins)
        train_window(twins, 1 + again, 2)
        twins.model.blocks[0].up.weight.norm()  # no forward is under way: gathered and freed
        assert_freed(twins)
    twins.check()
    accelerator.free_memory()


@pytest.mark.parametrize(
    ("mine", "theirs", "one", "other"),
    [
        ((0, 1, 2), (0, 1, 3), "blocks.2", "blocks.3"),
        ((0, 1), (0, 1, 2), None, "blocks.2"),
        ((0, 1, 2), (0, 2, 1), "blocks.1", "blocks.2"),
    ],
    ids=["another block", "one more block", "another order"],
)
@pytest.mark.ranks(2)
def test_divided_blocks_on_different_paths(mine, theirs, one, other):
    """Both ranks fail soon, with an error that says which blocks each of them wanted."""
    accelerator = start(SHARDED, config=WAITING)
    twins = Twins(accelerator, NET)
    twins.model.order = theirs if twins.axis.rank else mine
    with pytest.raises(CollectiveError, match="the ranks took different paths") as caught:
        accelerator.backward(NET.loss(twins.model, numbers(9, twins.axis.rank)))
    message = str(caught.value)
    for block, rank in ((one, 0), (other, 1)):
        assert f"rank {rank}" in message
        assert block is None or f"of {block})" in message, message
    accelerator.free_memory()
