"""Passes that differ from the first one, under ZeRO: recomputed, in evaluation, compiled, cast.

tests/core covers recompute on models in one process, bit by bit, and under ``ddp``; the conformance
suite covers evaluation between steps and a model that is compiled as a whole, with parameters that
stay whole. Here the blocks are really divided: values are away when a pass comes again.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain import Accelerator
from drivetrain.parts.naming import clean_name
from drivetrain.testing.conformance.twins import Twins, everyone, momentum, weights
from drivetrain.testing.models import OUT, WIDTH, Case, numbers, squared_error
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


class Tied(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].down.weight = self.blocks[0].down.weight


class Frozen(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.first.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)


class Twice(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.order = (0, 1, 0, 1)


NETS = {"plain": Net, "tied": Tied, "frozen": Frozen, "twice": Twice}


def case(factory, loss=squared_error):
    return Case(name="net", factory=factory, batch=numbers, loss=loss)


def start(strategy, **options):
    return Accelerator(strategy=strategy, cpu=True, **options)


def units_of(twins):
    return twins.accelerator.strategy_of(twins.model).placement.units


def calls(twins, operation):
    entry = twins.accelerator.traffic.entries().get(("dp", operation))
    return entry.calls if entry else 0


def assert_freed(twins):
    whole = [u.label for u in units_of(twins) if not u.resident and u.live_bytes]
    assert not whole, f"still whole: {whole}"


def train(twins, steps):
    """Train both; every trainable unit is reduced once per backward and freed after it."""
    trained = sum(bool(unit.layout.trainable) for unit in units_of(twins))
    for step in steps:
        before = calls(twins, "reduce_scatter")
        twins.backward(step)
        assert_freed(twins)
        assert calls(twins, "reduce_scatter") - before == trained
        twins.step()
    twins.check()


# --- recompute ---


def reentrant(block, x):
    """Such a checkpoint gives gradients only if an input requires them, so scripts see to that."""
    x = x.detach().requires_grad_() if torch.is_grad_enabled() and not x.requires_grad else x
    return checkpoint(block, x, use_reentrant=True)


AROUND = {
    "full": ({"mode": "full"}, None),
    "selective": ({"mode": "selective"}, None),
    "checkpoint": ({}, functools.partial(checkpoint, use_reentrant=False)),
    "reentrant": ({}, reentrant),
}


@pytest.mark.parametrize("net", list(NETS))
@pytest.mark.parametrize("how", list(AROUND))
@EACH
@pytest.mark.ranks(2)
def test_recompute(strategy, how, net):
    """One reduction per unit and equal gradients, whatever is tied, frozen, or called twice."""
    options, around = AROUND[how]
    accelerator = start(strategy, config={"recompute": options} if options else {})
    twins = Twins(accelerator, case(functools.partial(NETS[net], around=around)))
    train(twins, range(3))
    per_pass = twins.twin.order.count(1)
    assert twins.model.blocks[1].calls == 2 * 3 * per_pass, "the block was not recomputed"
    accelerator.free_memory()


@pytest.mark.parametrize("how", list(AROUND))
@EACH
@pytest.mark.ranks(2)
def test_dropout_is_the_same_when_recomputed(strategy, how):
    """Weights are bitwise those of a run that keeps everything; ranks drop differently."""
    found = []
    for options, around in (AROUND[how], ({}, None)):
        accelerator = start(strategy, config={"recompute": options} if options else {})
        built = case(functools.partial(Net, around=around, dropout=0.4)).build()
        model, optimizer = accelerator.prepare(built, momentum(built))
        torch.manual_seed(5 + accelerator.process_index)
        for step in range(3):
            accelerator.backward(squared_error(model, numbers(step, 0)))
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(accelerator, model))
        drawn = everyone(torch.rand(()).item())
        assert len(set(drawn)) == 2
        accelerator.free_memory()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), f"{name} differs when recomputed"


@EACH
@pytest.mark.ranks(2)
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
    twins = Twins(accelerator, case(Net, loss))
    twins.loss(0)
    assert len(packed) % 2 == 0
    assert packed[: len(packed) // 2] == packed[len(packed) // 2 :]
    train(twins, range(1, 4))
    accelerator.free_memory()


# --- evaluation ---


@EACH
@pytest.mark.ranks(2)
def test_evaluation_at_any_time(strategy):
    """First of all, in another order, without gradients of three kinds, between two passes."""
    accelerator = start(strategy)
    twins = Twins(accelerator, case(Net))

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
        train(twins, [10 + step])
    accelerator.free_memory()


# --- compiled, cast, and laid out otherwise ---


def compiled_blocks(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    return model


def compiled_in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("how", [compiled_blocks, compiled_in_place])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("strategy", [STAGES["zero1"], SHARDED], ids=["zero1", "sharded"])
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_blocks(strategy, when, how):
    """Blocks compiled by the user train the same and keep the names of the parameters."""
    accelerator = start(strategy)
    twins = Twins(accelerator, case(Net), wrap=how if when == "before" else None)
    if when == "after":
        how(twins.model)
    for step in range(3):
        twins.backward(step)
        assert_freed(twins)
        twins.step()
    for name, tensor in weights(accelerator, twins.model).items():
        expected = twins.twin.get_parameter(clean_name(name)).detach()
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-10)
    shown = [clean_name(name) for name in accelerator.get_state_dict(twins.model)]
    assert shown == list(twins.twin.state_dict())
    accelerator.free_memory()
    torch._dynamo.reset()


@EACH
@pytest.mark.ranks(2)
def test_autocast_on_top(strategy):
    """The user's own autocast around forward: bf16 products, also read from divided weights."""

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch.inputs.float())
            outputs = outputs + F.linear(batch.inputs.float(), model.last.weight)
        return F.mse_loss(outputs.float(), batch.targets.float())

    accelerator = start(strategy)
    twins = Twins(accelerator, case(lambda: Net().float(), loss))
    twins.tolerance = 1e-6
    train(twins, range(3))
    accelerator.free_memory()


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1 + i, 2 + i, 3, padding=1), nn.Tanh()) for i in range(3)
        )
        self.last = nn.Linear(4, OUT)
        self.to(torch.float64).to(memory_format=torch.channels_last)
        self.kept = []

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            self.kept.append(x.is_contiguous(memory_format=torch.channels_last))
        return self.last(x.mean((2, 3)))


@EACH
@pytest.mark.ranks(2)
def test_channels_last(strategy):
    """Kernels and images keep their layout, and train the same."""

    def loss(model, batch):
        image = batch.inputs.unflatten(1, (1, WIDTH, 1)) * batch.inputs[:, None, None]
        image = image.contiguous(memory_format=torch.channels_last)
        return F.mse_loss(model(image), batch.targets)

    accelerator = start(strategy)
    twins = Twins(accelerator, case(Image, loss))
    train(twins, range(3))
    assert all(twins.model.kept)
    for name, tensor in weights(accelerator, twins.model).items():
        assert tensor.stride() == twins.twin.get_parameter(name).stride()
    accelerator.free_memory()


@pytest.mark.parametrize("context", [False, True], ids=["set", "with"])
@EACH
@pytest.mark.ranks(2)
def test_another_default_device(strategy, context, tmp_path):
    """What the library makes lies where the model is, whatever new tensors do by default."""

    def on_meta(action, *arguments):
        if context:
            with torch.device("meta"):
                return action(*arguments)
        torch.set_default_device("meta")
        try:
            return action(*arguments)
        finally:
            torch.set_default_device(None)

    built = case(Net).build()
    accelerator = on_meta(start, strategy)
    twins = Twins(accelerator, case(lambda: copy.deepcopy(built)))
    on_meta(accelerator.free_memory)  # and once more, as twins prepare by themselves
    optimizer = momentum(built)
    twins.model, twins.optimizer = on_meta(accelerator.prepare, built, optimizer)
    for step in range(3):
        loss = on_meta(squared_error, twins.model, numbers(step, twins.axis.rank))
        on_meta(accelerator.backward, loss)
        on_meta(accelerator.clip_grad_norm_, twins.model.parameters(), 1e6)
        twins.backward_twin(step)
        on_meta(twins.optimizer.step)
        on_meta(twins.optimizer.zero_grad)
        twins.twin_optimizer.step()
        twins.twin_optimizer.zero_grad()
        assert_freed(twins)
    twins.check()
    on_meta(accelerator.save_state, tmp_path / "state")
    before = on_meta(weights, accelerator, twins.model)
    train(twins, [3])
    on_meta(accelerator.load_state, tmp_path / "state")
    for name, tensor in weights(accelerator, twins.model).items():
        assert torch.equal(tensor, before[name])
    accelerator.free_memory()
