"""What goes wrong in a step under ZeRO: the next step works, or every rank soon fails and says why.

The conformance suite covers a rank that dies, tests/core/collectives the order check by itself.
Here models with divided blocks fail in the middle of forward and backward, and ranks take different
paths through them.
"""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import CollectiveError
from drivetrain.testing.conformance.tcp import cut_connections, is_supported
from drivetrain.testing.conformance.twins import Twins, everyone, momentum
from drivetrain.testing.models import OUT, WIDTH, Case, linear, numbers, squared_error
from towers import Block, Tower

SMALL = {"bucket_mib": 0.001}
SHARDED = {"name": "zero3", "keep_below": 0}
STAGES = {
    "zero1": {"name": "zero1", **SMALL},
    "zero2": {"name": "zero2", **SMALL},
    "zero3": {"name": "zero3", **SMALL},
    "sharded": SHARDED,
    "kept": {**SHARDED, "reshard_after_forward": False},
}
EACH = pytest.mark.parametrize("strategy", list(STAGES.values()), ids=list(STAGES))
TIMEOUT_S = 3600.0  # far beyond a test's own limit: a rank that waits for it fails its test


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


NET = Case(name="net", factory=Net, batch=numbers, loss=squared_error)


def start(strategy, **options):
    return Accelerator(strategy=strategy, cpu=True, **options)


def assert_freed(twins):
    units = twins.accelerator.strategy_of(twins.model).placement.units
    whole = [u.label for u in units if not u.resident and u.live_bytes]
    assert not whole, f"still whole: {whole}"


def train(twins, steps):
    for step in steps:
        twins.backward(step)
        assert_freed(twins)
        twins.step()
    twins.check()


ERRORS = {
    "error": RuntimeError("sprung"),
    "out of memory": torch.OutOfMemoryError("sprung"),
    "interrupt": KeyboardInterrupt("sprung"),
}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", list(ERRORS))
@pytest.mark.parametrize("window", [1, 2])
@EACH
@pytest.mark.ranks(2)
def test_an_exception_on_every_rank(strategy, window, error, where):
    """What half a step left is cleared and freed, and the next steps are right."""
    accelerator = start(strategy, gradient_accumulation_steps=window)
    twins = Twins(accelerator, NET)

    def window_of(step):
        for i in range(window):
            with accelerator.accumulate(twins.model):
                twins.backward(window * step + i)
                twins.optimizer.step()
                twins.optimizer.zero_grad()
        for parameter in twins.twin.parameters():
            parameter.grad /= window
        twins.twin_optimizer.step()
        twins.twin_optimizer.zero_grad()
        twins.model.blocks[0].up.weight.norm()  # no forward is under way: gathered and freed
        assert_freed(twins)

    window_of(0)
    for again in range(2):
        twins.model.set = where, ERRORS[error]
        with pytest.raises(type(ERRORS[error]), match="sprung"):
            accelerator.backward(NET.loss(twins.model, numbers(9, twins.axis.rank)))
        twins.model.set = None
        if again:  # one script clears the gradients, another goes on to something else
            with torch.no_grad():
                NET.loss(twins.model, numbers(8, 0))
        twins.optimizer.zero_grad()
        if where == "forward" and error != "interrupt":  # that skips hooks: the next step frees
            assert_freed(twins)
        window_of(1 + again)
    twins.check()
    window_of(3)
    twins.check()
    accelerator.free_memory()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", ["error", "interrupt"])
@EACH
@pytest.mark.ranks(3)
def test_an_exception_on_one_rank(strategy, error, where):
    """It ends that rank as it would end a script; the others fail soon, not at the timeout."""
    if not is_supported():
        pytest.skip("ends the connections of a rank as the end of its process does, on Linux")
    accelerator = start(strategy, config={"launch": {"timeout_s": TIMEOUT_S}})
    twins = Twins(accelerator, NET)
    train(twins, range(2))
    odd = twins.axis.rank == 1
    twins.model.set = (where, ERRORS[error]) if odd else None
    everyone(None)
    with pytest.raises(type(ERRORS[error]) if odd else CollectiveError):
        accelerator.backward(NET.loss(twins.model, numbers(9, twins.axis.rank)))
    if odd:
        time.sleep(0.5)  # what this rank has sent off may end, as at the exit of a process
        cut_connections()
    accelerator.free_memory()


@EACH
@pytest.mark.ranks(2)
def test_a_rank_that_leaves_a_step_out(strategy):
    """After an error that one rank alone swallows, every rank is told, within the timeout."""
    accelerator = start(strategy, config={"launch": {"timeout_s": 5.0}})
    twins = Twins(accelerator, NET)
    train(twins, range(2))
    with pytest.raises(CollectiveError):
        for step in range(3):
            if step or twins.axis.rank:
                accelerator.backward(NET.loss(twins.model, numbers(step, 0)))
            twins.optimizer.step()
            twins.optimizer.zero_grad()
        accelerator.clip_grad_norm_(twins.model.parameters(), 1.0)
    accelerator.free_memory()


# --- ranks that take different paths ---

PATHS = {
    "another block": ((0, 1, 2), (0, 1, 3), "blocks.2", "blocks.3"),
    "one more block": ((0, 1), (0, 1, 2), None, "blocks.2"),
    "one less at the start": ((1, 2), (0, 1, 2), "blocks.1", "blocks.0"),
    "another order": ((0, 1, 2), (0, 2, 1), "blocks.1", "blocks.2"),
}


DIVIDED = pytest.mark.parametrize(
    "strategy",
    [SHARDED, {**SHARDED, "prefetch": 0}, STAGES["kept"]],
    ids=["sharded", "none ahead", "kept"],
)


@pytest.mark.parametrize("paths", list(PATHS))
@DIVIDED
@pytest.mark.ranks(2)
def test_divided_blocks_on_different_paths(strategy, paths):
    """Both ranks fail soon, with an error that says which blocks each of them wanted."""
    mine, theirs, one, other = PATHS[paths]
    accelerator = start(strategy, config={"launch": {"timeout_s": TIMEOUT_S}})
    twins = Twins(accelerator, NET)
    twins.model.order = theirs if twins.axis.rank else mine
    with pytest.raises(CollectiveError, match="the ranks took different paths") as caught:
        accelerator.backward(NET.loss(twins.model, numbers(9, twins.axis.rank)))
    message = str(caught.value)
    for block, rank in ((one, 0), (other, 1)):
        assert f"rank {rank}" in message
        assert block is None or f"of {block})" in message, message
    accelerator.free_memory()


@pytest.mark.parametrize("paths", list(PATHS))
@DIVIDED
@pytest.mark.ranks(2)
def test_different_paths_when_blocks_are_gathered_ahead(strategy, paths):
    """They may want the same blocks by chance: then the step is right, else both ranks fail."""
    accelerator = start(strategy, config={"launch": {"timeout_s": TIMEOUT_S}})
    twins = Twins(accelerator, NET)
    train(twins, range(2))
    twins.model.order = PATHS[paths][twins.axis.rank]
    try:
        accelerator.backward(NET.loss(twins.model, numbers(9, twins.axis.rank)))
        twins.optimizer.step()
    except CollectiveError as error:
        assert "the ranks took different paths" in str(error)
        assert "on rank 0" in str(error)
        assert "on rank 1" in str(error)
    else:
        for rank, path in enumerate(PATHS[paths][:2]):
            twins.twin.order = path
            (NET.loss(twins.twin, numbers(9, rank)) / 2).backward()
        twins.twin_optimizer.step()
        twins.check()
    accelerator.free_memory()


class Experts(nn.Module):
    """A mixture of experts: a rank runs those that its rows chose, or all of them."""

    def __init__(self, every):
        super().__init__()
        self.first = linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.last = linear(WIDTH, OUT)
        self.every = every

    def forward(self, x, chosen):
        x = self.first(x)
        for i, expert in enumerate(self.experts):
            rows = torch.full((len(x), 1), i in chosen)
            if self.every or i in chosen:
                x = torch.where(rows, expert(x), x)
        return self.last(x)


def experts(every):
    def loss(model, batch):
        chosen = ((0, 1), (0,), (0, 1))[batch.rank]  # no rank chooses the last one
        return F.mse_loss(model(batch.inputs, chosen), batch.targets)

    return Case(name="experts", factory=lambda: Experts(every), batch=numbers, loss=loss)


@pytest.mark.parametrize("every", [False, True], ids=["chosen", "every"])
@EACH
@pytest.mark.ranks(3)
def test_experts_that_some_ranks_do_not_run(strategy, every):
    """Whole ones get zeros from those ranks; divided ones too if all run, else a clear error."""
    accelerator = start(strategy, config={"launch": {"timeout_s": TIMEOUT_S}})
    twins = Twins(accelerator, experts(every), momentum)
    if every or strategy.get("keep_below") != 0:
        train(twins, range(3))
    else:
        with pytest.raises(CollectiveError) as caught:
            twins.backward(0)
        assert "experts.1" in str(caught.value)
    accelerator.free_memory()
