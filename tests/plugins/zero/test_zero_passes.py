"""Passes that differ from the first one, under ZeRO: recomputed, in evaluation, elsewhere.

tests/core covers recompute on models in one process, bit by bit, and under ``ddp``; the conformance
suite covers evaluation between steps. Here the blocks are really divided: values are away when a
pass comes again.
"""

import copy
import functools
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from drivetrain.testing.conformance.suite import Twins, momentum
from drivetrain.testing.models import Case, numbers, squared_error
from stacks import Block, Tower
from zero_stages import SHARDED, STAGES, assert_freed, each, start, train_reducing_once

pytestmark = pytest.mark.ranks(2)


class CountingBlock(Block):
    """It counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Net(Tower):
    block = CountingBlock


def net(kind, around):
    """Return a model with tied or frozen weights, or blocks that are called twice."""
    model = Net(around=around)
    if kind == "tied":
        model.blocks[2].up.weight = model.blocks[0].up.weight
        model.blocks[1].down.weight = model.blocks[0].down.weight
    elif kind == "frozen":
        for part in (model.first, model.blocks[0], model.blocks[1].up):
            part.requires_grad_(False)
    elif kind == "twice":
        model.order = (0, 1, 0, 1)
    return model


def reentrant(block, x):
    """Such a checkpoint gives gradients only if an input requires them, so scripts see to that."""
    x = x.detach().requires_grad_() if torch.is_grad_enabled() and not x.requires_grad else x
    return checkpoint(block, x, use_reentrant=True)


AROUND = (
    ("full", None),
    ("selective", None),
    ("", functools.partial(checkpoint, use_reentrant=False)),
    ("", reentrant),
)


@pytest.mark.parametrize(("name", "turn"), [("sharded", 0), ("kept", 1), ("zero1", 2), ("fsdp", 3)])
def test_recompute(name, turn):
    """One reduction per unit and equal gradients, whatever is tied, frozen, or called twice."""
    kinds = deque(("plain", "tied", "frozen", "twice"))
    kinds.rotate(turn)
    for kind, (mode, around) in zip(kinds, AROUND, strict=True):
        config = {"recompute": {"mode": mode}} if mode else {}
        accelerator = start(STAGES[name], config=config)
        twins = Twins(accelerator, Case(kind, functools.partial(net, kind, around)))
        train_reducing_once(twins, range(2))
        per_pass = twins.twin.order.count(1)
        assert twins.model.blocks[1].calls == 2 * 2 * per_pass, f"{kind}: not recomputed"


@each("sharded", "zero1")
def test_the_whole_model_or_loss_in_a_checkpoint(strategy):
    """Checkpoints and offloading around the model see what it saves, as without a strategy."""
    packed = []

    def keep(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    def loss(model, batch):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model(batch.inputs)
        whole = checkpoint(model, batch.inputs, use_reentrant=False)
        head = checkpoint(torch.matmul, hidden, model.last.weight, use_reentrant=False)
        past = checkpoint(model.blocks[1], head, use_reentrant=False)
        return F.mse_loss(whole, batch.targets) + past.square().mean()

    accelerator = start(strategy)
    twins = Twins(accelerator, Case("net", Net, loss=loss))
    twins.loss(0)
    assert len(packed) % 2 == 0
    assert packed[: len(packed) // 2] == packed[len(packed) // 2 :]
    train_reducing_once(twins, range(1, 4))


@each("sharded", "zero1", "kept")
def test_evaluation_at_any_time(strategy):
    """First of all, in another order, without gradients of three kinds, between two passes."""
    accelerator = start(strategy)
    twins = Twins(accelerator, Case("net", Net))

    def evaluate(step, order, context):
        shown = []
        for model in (twins.model, twins.twin):
            model.eval()
            model.order = order
            with context():
                shown.append(model(numbers(step, twins.axis.rank).inputs).detach().clone())
            model.order = (0, 1, 2)
            model.train()
        torch.testing.assert_close(*shown, rtol=1e-10, atol=1e-10)

    contexts = (torch.no_grad, torch.inference_mode, torch.enable_grad)
    orders = ((2, 0, 1), (0, 1, 2), (1,), (2, 2, 1, 0))
    for step, context in enumerate(contexts):
        for order in orders:
            evaluate(step, order, context)
        loss = twins.loss(step)
        evaluate(step, orders[step], context)
        accelerator.backward(loss)
        twins.backward_twin(step)
        evaluate(step, orders[0], context)
        twins.step()
        evaluate(step, orders[step], torch.no_grad)
        assert_freed(twins)
        train_reducing_once(twins, [10 + step])


def test_another_default_device():
    """What the library makes lies where the model is, whatever new tensors do by default."""

    def on_meta(action, *arguments):
        with torch.device("meta"):
            return action(*arguments)

    built = Case("net", Net).build()
    accelerator = on_meta(start, SHARDED)
    twins = Twins(accelerator, Case("net", lambda: copy.deepcopy(built)))
    on_meta(accelerator.free_memory)  # and once more, as twins prepare by themselves
    optimizer = momentum(built)
    twins.model, twins.optimizer = on_meta(accelerator.prepare, built, optimizer)
    for step in range(2):
        loss = on_meta(squared_error, twins.model, numbers(step, twins.axis.rank))
        on_meta(accelerator.backward, loss)
        on_meta(accelerator.clip_grad_norm_, twins.model.parameters(), 1e6)
        twins.backward_twin(step)
        on_meta(twins.step)
    twins.check()
