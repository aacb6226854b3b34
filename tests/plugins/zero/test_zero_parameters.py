"""Parameters under ZeRO: frozen, thawed, odd dtypes and strides, in lists, added too late; facts.

The conformance suite covers tied, unused, branching, mixed, transposed, tiny and empty parameters,
and those without a gradient in a step.
"""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.testing.conformance.twins import Twins, adamw, everyone, weights
from drivetrain.testing.models import CASES, HIDDEN, OUT, WIDTH, Case, linear
from drivetrain.testing.models import numbers as batches
from drivetrain.testing.models import squared_error as loss_of

SMALL = {"bucket_mib": 0.001}
STAGES = {
    "zero1": {"name": "zero1", **SMALL},
    "zero2": {"name": "zero2", **SMALL},
    "zero3": {"name": "zero3", **SMALL},
    "sharded": {"name": "zero3", "keep_below": 0},
    "matrices": {"name": "zero2", "partition": "parameter", **SMALL},
}
WORLDS = pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.ranks(n), id=f"ranks{n}") for n in (1, 3)]
)
each = pytest.mark.parametrize("strategy", list(STAGES.values()), ids=list(STAGES))


def start(strategy, **options):
    return Accelerator(strategy=strategy, cpu=True, **options)


def case(factory):
    return Case(name=factory.__name__, factory=factory, batch=batches, loss=loss_of)


def train(twins, steps):
    for step in steps:
        twins.backward(step)
        twins.step()
    twins.check()


class Lists(nn.Module):
    """Parameters in a ParameterList and a ParameterDict, shared between the two."""

    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList(
            [nn.Parameter(torch.randn(HIDDEN, WIDTH, dtype=torch.float64)) for _ in range(3)]
        )
        self.named = nn.ParameterDict(
            {"last": nn.Parameter(torch.randn(OUT, HIDDEN, dtype=torch.float64))}
        )
        self.named["again"] = self.rows[0]

    def forward(self, inputs):
        hidden = sum(torch.tanh(inputs @ row.T) for row in self.rows)
        hidden = hidden + inputs @ self.named["again"].T
        return hidden @ self.named["last"].T


class Quantized(nn.Module):
    """An int8 matrix with a trainable scale, a bool mask, and a complex filter."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(
            torch.randint(-9, 9, (HIDDEN, WIDTH), dtype=torch.int8), requires_grad=False
        )
        self.mask = nn.Parameter(torch.rand(HIDDEN, WIDTH) > 0.2, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(HIDDEN, 1, dtype=torch.float64))
        self.filter = nn.Parameter(torch.randn(HIDDEN, dtype=torch.complex128))
        self.last = linear(HIDDEN, OUT)

    def forward(self, inputs):
        weight = self.codes * self.mask * self.scale
        hidden = torch.fft.ifft(torch.fft.fft(inputs @ weight.T) * self.filter).real
        return self.last(hidden)


class Images(nn.Module):
    """A channels_last convolution, an expanded bias, and a slice of a larger tensor."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, dtype=torch.float64)
        self.conv.to(memory_format=torch.channels_last)
        # torch's optimizers refuse to step expanded parameters.
        self.expanded = nn.Parameter(
            torch.randn(1, dtype=torch.float64).expand(4), requires_grad=False
        )
        self.sliced = nn.Parameter(torch.randn(8, 6, dtype=torch.float64)[::2, 1:3])
        self.last = linear(4, OUT)

    def forward(self, inputs):
        images = inputs[:, :4].reshape(-1, 1, 2, 2).expand(-1, 2, -1, -1)
        pooled = self.conv(images).mean((2, 3)) + self.expanded
        return self.last(pooled + self.sliced.sum(1))


@each
@pytest.mark.parametrize("factory", [Lists, Images], ids=["lists", "strides"])
@WORLDS
def test_containers_and_strides(strategy, size, factory):
    """Values, names, identity and shape are those of one process; dense strides are kept."""
    plain = case(factory).build()
    accelerator = start(strategy)
    twins = Twins(accelerator, case(factory), adamw)
    train(twins, range(3))
    ours = dict(twins.model.named_parameters(remove_duplicate=False))
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        assert ours[name].shape == parameter.shape
        if name == "conv.weight":
            assert ours[name].stride() == parameter.stride(), "channels_last was lost"
    if factory is Lists:
        assert twins.model.named["again"] is twins.model.rows[0]
    accelerator.free_memory()


@each
@WORLDS
def test_dtypes_that_do_not_train(strategy, size):
    """int8 and bool parameters stay what they are, beside trainable ones."""
    complex_too(strategy)
    accelerator = start(strategy)

    def factory():
        model = Quantized()
        model.filter.requires_grad_(False)
        return model

    def make(model):
        return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    twins = Twins(accelerator, case(factory), make)
    train(twins, range(3))
    found = weights(accelerator, twins.model)
    assert found["codes"].dtype is torch.int8
    assert found["mask"].dtype is torch.bool
    assert found["filter"].dtype is torch.complex128
    accelerator.free_memory()


def complex_too(strategy):
    """Complex numbers are added and averaged like others."""
    accelerator = start(strategy)
    twins = Twins(
        accelerator,
        case(Quantized),
        lambda model: SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
    )
    train(twins, range(3))
    accelerator.free_memory()


@each
@pytest.mark.ranks(3)
def test_groups_without_trainable_parameters(strategy):
    """A group of frozen parameters, and an empty one, keep their places and rates."""

    def make(model):
        model[0].requires_grad_(False)
        first, middle, last = model[0], model[2], model[4]
        return SGD(
            [
                {"params": first.parameters(), "lr": 5.0, "weight_decay": 0.5},
                {"params": [p for p in middle.parameters() if p.dim() > 7], "lr": 3.0},
                {"params": [*middle.parameters(), *last.parameters()]},
            ],
            lr=0.1,
            momentum=0.9,
        )

    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["mlp"], make)
    train(twins, range(3))
    assert [group["lr"] for group in twins.optimizer.param_groups] == [5.0, 3.0, 0.1]
    accelerator.free_memory()


def bytes_of(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Adapter(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 3, bias=False), nn.Linear(3, 64, bias=False)

    def forward(self, inputs):
        return torch.tanh(self.frozen(inputs) + self.up(self.down(inputs)))


@each
@pytest.mark.ranks(2)
def test_frozen_parameters_cost_nothing(strategy):
    """Gradients, optimizer state and reductions of adapters alone, to the byte, over all ranks."""
    accelerator = start({**strategy, "bucket_mib": 1})  # what may share a bucket does
    model = nn.Sequential(*(Adapter() for _ in range(3)), nn.Linear(64, 4))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        before = accelerator.traffic.sent().get(("dp", "reduce_scatter"), 0)
        accelerator.backward(model(torch.ones(2, 64)).sum())
        gradients = [*accelerator.strategy_of(model).gradients()]
        optimizer.step()
        reduced = accelerator.traffic.sent()["dp", "reduce_scatter"] - before
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments = [value for value in states if value.dim()]
    found = everyone((reduced, bytes_of(gradients), bytes_of(moments)))
    copies = 2 if strategy["name"] == "zero1" else 1
    assert [sum(one) for one in zip(*found, strict=True)] == [
        4 * trained,
        4 * trained * copies,
        8 * trained,
    ]
    assert all(parameter.grad is None for parameter in frozen)
    accelerator.free_memory()


@pytest.mark.parametrize("by_user", [False, True], ids=["accelerator", "user"])
@each
@WORLDS
def test_freezing_and_thawing(strategy, size, by_user):
    """Layers that begin to train later, and that stop: as in one process, whoever backwards."""
    accelerator = start(strategy)

    def make(model):
        model[0].requires_grad_(False)
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(steps):
        for step in steps:
            loss = twins.loss(step)
            loss.backward() if by_user else accelerator.backward(loss)
            twins.backward_twin(step)
            twins.step()
        twins.check()

    twins = Twins(accelerator, CASES["mlp"], make)
    train(range(2))
    for model in (twins.model, twins.twin):
        model[0].requires_grad_(True)
        model[2].requires_grad_(False)
    train(range(2, 5))
    for model in (twins.model, twins.twin):
        model[2].requires_grad_(True)
    train(range(5, 7))
    accelerator.free_memory()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@each
@pytest.mark.ranks(2)
def test_a_layer_that_is_frozen_again_before_its_step(strategy, set_to_none):
    """The optimizer steps it by its gradient, and decays it for as long as it has one, if zeros."""
    accelerator = start(strategy)

    def make(model):
        model[0].requires_grad_(False)
        return AdamW(model.parameters(), lr=0.05, weight_decay=0.1)

    twins = Twins(accelerator, CASES["mlp"], make)
    for step in range(4):
        for model in (twins.model, twins.twin):
            model[0].requires_grad_(step == 1)
        twins.backward(step)
        for model in (twins.model, twins.twin):
            model[0].requires_grad_(False)
        twins.step(set_to_none=set_to_none)
    twins.check()
    accelerator.free_memory()


def replace_weight(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def append_layer(model):
    model.append(nn.Linear(OUT, OUT, dtype=torch.float64))


def register(model):
    model[2].register_parameter("extra", nn.Parameter(torch.zeros(3)))


@each
@pytest.mark.parametrize(
    ("change", "name"),
    [(replace_weight, "2.weight"), (append_layer, "5.weight"), (register, "2.extra")],
    ids=["replaced", "appended", "registered"],
)
@WORLDS
def test_parameters_that_come_after_prepare(strategy, size, change, name):
    """Nobody would average their gradients: the next step says so, on every rank."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["mlp"], adamw)
    with accelerator.gathered(twins.model):
        change(twins.model)
    batch = twins.case.batch(0, twins.axis.rank)
    accelerator.backward(twins.case.loss(twins.model, batch))
    with pytest.raises(UsageError, match=f"found another one, '{name}'"):
        twins.optimizer.step()
    accelerator.free_memory()


@each
@pytest.mark.ranks(2)
def test_frozen_parameters_may_come_later(strategy):
    """What is not trained needs no strategy."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["mlp"], adamw)
    for model in (twins.model, twins.twin):
        model[2].extra = nn.Parameter(torch.zeros(3), requires_grad=False)
        twins.backward(0) if model is twins.twin else None
    twins.optimizer.step()
    accelerator.free_memory()


@each
@pytest.mark.ranks(2)
def test_facts_are_those_of_the_users_model(strategy):
    """Shape, dtype, names, counts and flags, between steps, without bringing any values."""
    accelerator = start(strategy)
    plain = CASES["tied"].build()
    model = copy.deepcopy(plain)
    objects = list(model.parameters())
    model, _ = accelerator.prepare(model, AdamW(model.parameters()))
    sent = accelerator.traffic.total()
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    for (name, ours), (theirs_name, theirs) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == theirs_name
        assert (ours.shape, ours.size(), ours.ndim) == (theirs.shape, theirs.size(), theirs.ndim)
        assert (ours.numel(), len(ours), ours.dtype) == (theirs.numel(), len(theirs), theirs.dtype)
        assert (ours.requires_grad, ours.is_leaf) == (theirs.requires_grad, theirs.is_leaf)
        assert (ours.stride(), ours.device) == (theirs.stride(), theirs.device)
        assert isinstance(ours, nn.Parameter)
        assert str(tuple(ours.shape)) in repr(ours) or repr(ours) == repr(theirs)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert repr(model) == repr(plain)
    assert accelerator.traffic.total() == sent, "a fact cost communication"
    accelerator.free_memory()


@each
@pytest.mark.ranks(2)
def test_one_rank_may_look_by_itself(strategy):
    """Printing, identity and what ``.data`` tells, on rank 0 alone; values are refused there."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["mlp"], adamw)
    train(twins, range(1))
    weight = twins.model[0].weight
    away = type(weight) is not nn.Parameter
    assert away == ("keep_below" in strategy)
    if twins.axis.rank == 0:
        assert f"{weight}" == str(weight) == repr(weight)
        assert away == ("values elsewhere, shape (13, 7), torch.float64" in f"{weight}")
        assert (weight.data.shape, weight.data.dtype) == ((HIDDEN, WIDTH), torch.float64)
        assert {weight: 1}[next(iter(twins.model.parameters()))] == 1
        if away:
            with pytest.raises(UsageError, match="divided over the ranks between steps"):
                weight.data.norm()
            with pytest.raises(UsageError, match="divided over the ranks between steps"):
                weight.data.zero_()
    train(twins, range(1, 2))
    accelerator.free_memory()
