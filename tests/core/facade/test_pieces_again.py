"""Pieces of a batch in which memory runs out: computed again in smaller ones, with equal results.

The allocator's error is raised where it strikes in fact: in a forward, in the loss that the script
computes, or in a backward that has computed some gradients already.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from drivetrain import Accelerator, GradScalerKwargs
from drivetrain.errors import UsageError
from drivetrain.facade.gradients import PieceGradients
from drivetrain.facade.pieces import NOT_AGAIN, Measured
from drivetrain.planner.auto import HEAD
from drivetrain.testing.models import OUT, WIDTH
from stacks import LowRank, Parts, Tower

ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB."
GATHERS = {"name": "zero3", "keep_below": 0}


class Room:
    """Memory for so many rows at once, at one place of a step."""

    def __init__(self, rows, place):
        self.rows, self.place, self.failed = rows, place, []

    def take(self, place, x):
        if place == self.place and len(x) > self.rows:
            self.failed.append(len(x))
            raise torch.OutOfMemoryError(ERROR)
        return x


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, room):
        ctx.room = room
        return x.view_as(x)

    @staticmethod
    def backward(ctx, above):
        return ctx.room.take("backward", above), None


def short(room):
    """Return what counts its calls in a buffer, and needs memory between two towers."""

    def compute(m, x):
        m.calls += 1
        return m.second(InBackward.apply(m.room.take("forward", m.first(x)), m.room))

    ends = {"first": Tower(), "second": nn.Linear(OUT, 3).double()}
    return Parts(compute, **ends, room=room, calls=nn.Buffer(torch.zeros(())))


def batch(rank, step, rows=9):
    generator = torch.Generator().manual_seed(10 * rank + step)
    counted = torch.rand(rows, generator=generator) > 0.3
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64), counted


def check_steps(accelerator, place, *, tokens=False, steps=3, window=1, fails_on=None):
    """Train on pieces that fail on some ranks, and compare with one process that has all rows."""
    axis = accelerator.mesh["dp"]
    room = Room(2 if axis.rank in (fails_on or (axis.rank,)) else 99, place)
    model = short(room)
    alone = copy.deepcopy(model)
    alone.room.rows = 999
    room = model.room
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    options = torch.optim.SGD(model.parameters(), lr=0.1)
    model, own = accelerator.prepare(model, options)
    seen = []
    model.second.weight.register_hook(lambda grad: seen.append(grad.shape))

    def train(part):
        inputs, counted = part
        losses = model(inputs).square().mean(-1)
        room.take("loss", losses)
        if tokens:
            weight = int(counted.sum())
            loss = (losses * counted).sum() / max(weight, 1)
            accelerator.backward(loss, weight=weight)
        else:
            accelerator.backward(losses.mean())
        return losses.detach()

    failures = ([8, 4, 4], [3, 3, 3], [], [])
    for step in range(steps):
        found = accelerator.each_piece(train, batch(axis.rank, step))
        assert sum(map(len, found)) == 9
        # What failed is known: the next batches have smaller pieces.
        assert room.failed == (failures[step] if room.rows == 2 else [])
        room.failed.clear()
        own.step()
        own.zero_grad()
        if (step + 1) % window:
            continue
        each = [batch(r, s) for s in range(step + 1 - window, step + 1) for r in range(axis.size)]
        inputs, counted = (torch.cat(leaves) for leaves in zip(*each, strict=True))
        losses = alone(inputs).square().mean(-1)
        (losses[counted] if tokens else losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == (steps // window if axis.size > 1 else 2 + 3 + 5)  # once for a piece
    state = accelerator.get_state_dict(model)
    for name, value in alone.state_dict().items():
        if name != "calls":
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
    accelerator.free_memory()


@pytest.mark.parametrize("place", ["forward", "loss", "backward"])
@pytest.mark.parametrize(
    ("strategy", "tokens"), [("ddp", False), ("zero1", True), ("zero2", False), ("ddp", True)]
)
@pytest.mark.ranks(2)
def test_a_rank_without_memory_computes_its_piece_again_by_itself(strategy, tokens, place):
    """The other rank computes it whole, and waits where gradients are sent."""
    accelerator = Accelerator(strategy=strategy, cpu=True, config={"micro_batch": "auto"})
    check_steps(accelerator, place, tokens=tokens, fails_on=(1,))


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("strategy", [{"name": "ddp"}, GATHERS, {"name": "fsdp"}])
def test_one_process_computes_pieces_again_under_each_strategy(strategy, place):
    accelerator = Accelerator(strategy=strategy, cpu=True, config={"micro_batch": "auto"})
    check_steps(accelerator, place)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.ranks(2)
def test_pieces_are_computed_again_within_a_window(strategy):
    options = {"gradient_accumulation_steps": 2, "config": {"micro_batch": "auto"}}
    accelerator = Accelerator(strategy=strategy, cpu=True, **options)
    check_steps(accelerator, "backward", steps=4, window=2, fails_on=(0,))


def test_a_try_that_fails_leaves_generators_buffers_and_the_window_as_they_were():
    """Dropout draws what it would have drawn, and calls are counted once for what was computed."""
    accelerator = Accelerator(cpu=True, config={"micro_batch": "auto"})
    room = Room(2, "loss")
    model = short(room)
    alone = copy.deepcopy(model)
    model = accelerator.prepare(model)
    drawn = []

    def train(rows):
        drawn.append(torch.rand(()))
        losses = model(rows).square().mean(-1)
        accelerator.backward(losses.mean())
        room.take("loss", losses)  # with all gradients there
        return len(rows)

    inputs = batch(0, 0)[0]
    assert accelerator.each_piece(train, inputs) == [1, 2, 2, 2, 2]
    assert room.failed == [8, 4, 4]
    assert [drawn[at] for at in (1, 2)] == [drawn[3]] * 2
    assert drawn[5] == drawn[6]
    assert model.calls == 5
    alone.room.rows = 99
    alone(inputs).square().mean().backward()
    for found, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-12, atol=1e-12)
    assert accelerator.gradient_state.backwards == 2  # one of each piece of the batch


def test_a_row_alone_ends_the_run_as_ever_and_what_a_try_cannot_do_is_refused():
    accelerator = Accelerator(cpu=True, config={"micro_batch": "auto"})
    model = accelerator.prepare(short(Room(99, "loss")))
    failed = []

    def fails(rows):
        accelerator.backward(model(rows).mean())
        if model.calls > 1:
            failed.append(len(rows))
            raise torch.OutOfMemoryError(ERROR)

    with pytest.raises(torch.OutOfMemoryError) as raised:
        accelerator.each_piece(fails, batch(0, 0)[0])
    assert failed == [8, 4, 2, 1]
    assert sum(note.startswith(HEAD) for note in raised.value.__notes__) == 1

    def differentiable(rows):
        accelerator.backward(model(rows).mean(), create_graph=len(rows) > 1)

    accelerator = Accelerator(cpu=True, config={"micro_batch": "auto"})
    model = accelerator.prepare(short(Room(99, "loss")))
    with pytest.raises(UsageError, match="retain_graph alone in each_piece"):
        accelerator.each_piece(differentiable, batch(0, 0)[0])
    accelerator.free_memory()


def test_the_loss_scale_of_fp16_is_in_the_gradients_of_pieces_that_are_computed_again():
    options = {
        "kwargs_handlers": [GradScalerKwargs(init_scale=8.0)],
        "config": {"micro_batch": "auto"},
    }
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", **options)
    room = Room(2, "loss")
    model = accelerator.prepare(nn.Linear(2, 1))
    rows = torch.arange(18.0).view(9, 2) / 8

    def train(part):
        accelerator.backward(room.take("loss", model(part)).mean())

    accelerator.each_piece(train, rows)
    assert room.failed == [8, 4, 4]
    torch.testing.assert_close(model.weight.grad / 8.0, rows.mean(0, keepdim=True))


def steps(accelerator, model, optimizer, rows):
    accelerator.backward(model(rows).mean())
    optimizer.step()


def clips(accelerator, model, optimizer, rows):
    accelerator.backward(model(rows).mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def goes_backward_alone(accelerator, model, optimizer, rows):
    model(rows).mean().backward()


def clears(accelerator, model, optimizer, rows):
    model.second.weight.grad.zero_()


def goes_backward_twice(accelerator, model, optimizer, rows):
    accelerator.backward(model(rows).mean())
    accelerator.backward(model(rows).mean())


def recomputes_in_backward(accelerator, model, optimizer, rows):
    rows = rows.requires_grad_()
    accelerator.backward(checkpoint(model, rows, use_reentrant=True).mean())


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (steps, "optimizers to step after each_piece"),
        (clips, "optimizers to step after each_piece"),
        (goes_backward_alone, "leaves .grad to accelerator.backward"),
        (clears, "leaves .grad to accelerator.backward"),
        (goes_backward_twice, "one weighted backward"),
        (recomputes_in_backward, "checkpoints with use_reentrant=False"),
    ],
)
def test_what_a_try_would_lose_or_count_twice_is_refused(function, found):
    accelerator = Accelerator(cpu=True, config={"micro_batch": "auto"})
    model = short(Room(99, "loss"))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train(rows):
        if len(rows) == 1:
            accelerator.backward(model(rows).mean())
        else:
            function(accelerator, model, optimizer, rows)

    with pytest.raises(UsageError, match=found):
        accelerator.each_piece(train, batch(0, 0)[0])
    accelerator.free_memory()


class Fails(TorchDispatchMode):
    """Lets the operator of a number fail, from 1."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if not self.left:
            raise torch.OutOfMemoryError(ERROR)
        return func(*args, **(kwargs or {}))


def adapted_and_hooked():
    """Return a frozen tower with adapters, and hooks on modules and parameters."""
    torch.manual_seed(0)
    model = Tower()
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = LowRank(block.up)
    model.blocks[0].register_forward_hook(lambda module, inputs, output: 1.5 * output)
    model.blocks[1].register_full_backward_hook(lambda module, below, above: (0.5 * below[0],))
    first, last = (model.blocks[each].up.up.weight for each in (0, 2))
    first.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    last.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))
    return model


def trained(strategy, number):
    """Return the weights after two steps of which one rank's tries fail at an operator."""
    accelerator = Accelerator(strategy=strategy, cpu=True, config={"micro_batch": "auto"})
    model = adapted_and_hooked()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, failed = accelerator.process_index, []

    def train(rows):
        fails = rank and len(rows) > 4 and accelerator._gradients.held_back is not None
        with Fails(number if fails else 0) as operators:
            accelerator.backward(model(rows).square().mean())
        failed.append(fails and operators.left > 0)

    for step in range(2):
        accelerator.each_piece(train, batch(rank, step)[0])
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return weights, any(failed)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.ranks(2)
def test_an_error_at_any_operator_leaves_nothing_of_a_frozen_model_with_hooks(strategy):
    """The hooks of parameters see the mean over all ranks, once."""
    expected, _ = trained(strategy, 0)
    for number in (1, 40, 90):
        found, beyond = trained(strategy, number)
        assert not beyond
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_a_collective_in_a_try_is_refused():
    """The other rank may call the function less often, and meet another operation."""
    accelerator = Accelerator(cpu=True, config={"micro_batch": "auto"})
    model = accelerator.prepare(short(Room(99, "loss")))

    def train(rows):
        accelerator.backward(model(rows).mean())
        return accelerator.gather_for_metrics(torch.ones(()))

    with pytest.raises(UsageError, match="no collective but backward"):
        accelerator.each_piece(train, batch(0, 0)[0])
    accelerator.free_memory()


def test_clearing_at_the_head_of_pieces_leaves_those_before():
    accelerator = Accelerator(cpu=True, config={"micro_batch": "auto"})
    model = short(Room(99, "loss"))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone = copy.deepcopy(model)
    rows = batch(0, 0)[0]
    for part in accelerator.micro_batches(rows):
        optimizer.zero_grad()
        accelerator.backward(model(part).mean())
    alone(rows).mean().backward()
    for found, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-12, atol=1e-12)


def test_a_buffer_that_a_failed_try_makes_is_gone_and_narrow_losses_do_not_overflow():
    accelerator = Accelerator(cpu=True, config={"micro_batch": "auto"})
    room = Room(4, "loss")
    model = short(room)
    model.register_buffer("most", None)
    model = accelerator.prepare(model)

    def train(rows):
        model.most = torch.tensor(len(rows)) if model.most is None and len(rows) > 1 else model.most
        loss = room.take("loss", model(rows)).square().mean()
        accelerator.backward((0 * loss + 5).half(), weight=1e5)

    accelerator.each_piece(train, batch(0, 0)[0])
    assert model.most == 4
    assert [float(loss) for _, loss in accelerator._gradients.finite.losses] == [5.0, 5.0]


@pytest.mark.ranks(2)
def test_where_ranks_gather_within_a_piece_the_error_stays_one_and_says_why():
    accelerator = Accelerator(strategy=GATHERS, cpu=True, config={"micro_batch": "auto"})
    model = accelerator.prepare(short(Room(2, "forward")))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        accelerator.each_piece(
            lambda part: accelerator.backward(model(part).mean()), batch(0, 0)[0]
        )
    assert NOT_AGAIN in raised.value.__notes__
    accelerator.free_memory()


def test_narrow_gradients_of_pieces_are_rounded_once():
    leaf, whole = nn.Parameter(torch.ones((), dtype=torch.bfloat16)), PieceGradients()
    for factor in (1.0, *[2.0**-9] * 4):
        part, loss = PieceGradients(), leaf * factor
        part.add(loss, loss, 1.0, {})
        whole.join(part)
    whole.send(lambda loss, weight: loss.backward())
    assert leaf.grad == 1 + 2.0**-7


def test_pieces_that_were_computed_are_no_try_unless_rows_are_longer():
    measured = Measured()
    for rows, per_row in ((4, 8), (2, 4), (1, 16)):
        measured.note(rows, per_row)
    assert measured.computed == [(32, 8), (16, 16)]
    assert measured.has(4, 8)
    assert measured.has(1, 16)
    assert not measured.has(5, 8)
    assert not measured.has(2, 16)
