"""Low precision under fsdp: all dtypes of a unit travel at once, with masters and without.

The conformance suite compares a precision with one process; here is what is peculiar to units, and
to ways of sharding that keep values or gradients longer.
"""

import functools

import pytest
import torch
from torch import nn

from drivetrain.model.modules import clean_name
from drivetrain.testing.conformance.loops import LowTwins, copies_loss, in_fp32
from drivetrain.testing.conformance.suite import Twins, everyone, weights
from drivetrain.testing.models import HIDDEN, OUT, WIDTH, Case
from stacks import Residual, Stack, Tower
from zero_stages import start

HYBRID_LOCAL = {"sharding": "hybrid", "shard_size": 2, "accumulate": "local"}
LOW = torch.bfloat16


def blocks():
    """Return a model of matrices and vectors: with low parameters, two dtypes side by side."""
    members = [Residual(WIDTH, HIDDEN, norm=nn.LayerNorm) for _ in range(2)]
    return Stack(members, last=nn.Linear(WIDTH, OUT))


CASE = in_fp32(Case("blocks", blocks))


def sent(accelerator):
    """Return calls and bytes of all gathers and of all reductions."""
    entries = accelerator.traffic.entries()
    found = []
    for operation in ("all_gather", "reduce_scatter"):
        own = [entry for (_, name), entry in entries.items() if name == operation]
        found += [sum(entry.calls for entry in own), sum(entry.bytes for entry in own)]
    return found


def low(options, **dtypes):
    config = {"dtypes": {"param": "bf16", **dtypes}}
    return start({"name": "fsdp", **options}, mixed_precision="bf16", config=config)


@pytest.mark.parametrize(
    ("options", "reduce", "sizes"),
    [
        pytest.param({}, "as_given", (2, 4), marks=pytest.mark.ranks(2), id="full"),
        pytest.param({"sharding": "grad"}, "bf16", (2, 2), marks=pytest.mark.ranks(2), id="grad"),
        pytest.param(HYBRID_LOCAL, "fp32", (4, 4), marks=pytest.mark.ranks(4), id="hybrid-local"),
    ],
)
def test_two_dtypes_travel_as_one(options, reduce, sizes):
    """Shards in fp32 are the masters; what travels is cast, all kinds of a unit in one go.

    Sizes are the bytes of an element of a gradient on the wire: of a matrix and of a vector.
    """
    accelerator = low(options, reduce=reduce)
    twins = LowTwins(accelerator, CASE, copies_loss(CASE, LOW), rounding=1e-5)
    units = accelerator.strategy_of(twins.model).placement.units
    for unit in units:
        assert {(f.dtype, f.master) for f in unit.layout.flats} == {
            (LOW, torch.float32),
            (torch.float32, torch.float32),
        }
    twins.train(0, [1.0])
    before = sent(accelerator)
    twins.train(1, [1.0])
    grown = [b - a for a, b in zip(before, sent(accelerator), strict=True)]
    assert len(units) == grown[0] == grown[2] == 3
    matrices = sum(p.numel() for p in CASE.build().parameters() if p.dim() > 1)
    vectors = sum(p.numel() for p in CASE.build().parameters() if p.dim() < 2)
    for found, (matrix, vector) in ((grown[1], (2, 4)), (grown[3], sizes)):
        whole = sum(everyone(found)) / (accelerator.num_processes // 2)
        assert whole == matrices * matrix + vectors * vector
    twins.check_moved(0.05, rounded=2.0**-8)


@pytest.mark.ranks(2)
def test_without_masters():
    """The low shards themselves are updated, and saved, as in one process with such weights."""
    accelerator = low({}, master="none")
    built, twin = CASE.build(), CASE.build()
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(LOW) if parameter.dim() > 1 else parameter.data
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(built, torch.optim.SGD(built.parameters(), lr=0.1))
    axis = accelerator.mesh["dp"]
    for step in range(3):
        accelerator.backward(CASE.loss(model, CASE.batch(step, axis.rank)))
        for rank in range(axis.size):
            with torch.autocast("cpu", LOW):
                loss = CASE.loss(twin, CASE.batch(step, rank))
            (loss / axis.size).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    groups = optimizer.optimizer.param_groups
    held = [p.dtype for group in groups for p in group["params"]]
    assert set(held) == {LOW, torch.float32}
    found = accelerator.get_state_dict(model)
    for name, tensor in twin.state_dict().items():
        assert found[name].dtype is tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=2e-2, atol=2e-3)


@pytest.mark.ranks(3)
def test_a_third_of_a_gradient_has_the_digits_of_the_wire():
    """In bf16 a third of one is 0.33398."""
    accelerator = low({"unit_from": 1}, reduce="fp32")
    model = accelerator.prepare(nn.Linear(WIDTH, OUT, bias=False))
    accelerator.backward(model(torch.ones(1, WIDTH)).sum())
    for piece in accelerator.strategy_of(model).gradients():
        torch.testing.assert_close(piece, torch.ones_like(piece), rtol=0, atol=1e-6)


# --- compiled blocks under fsdp: the conformance suite compiles whole models ---


FULL = {"name": "fsdp"}
GRAD = {"name": "fsdp", "sharding": "grad"}
TOWER = Case("tower", functools.partial(Tower, 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [FULL, GRAD], ids=["full", "grad"])
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_blocks(strategy):
    """By the user before prepare or after it: as eager, and no graph is made after two steps."""
    accelerator = start(strategy)
    twins = Twins(accelerator, TOWER, wrap=None if strategy == FULL else compiled)
    if strategy == FULL:
        for block in twins.model.blocks:
            block.compile(backend="aot_eager")
    graphs = []
    for step in range(4):
        twins.backward(step)
        twins.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[1] == graphs[3]
    for name, tensor in weights(accelerator, twins.model).items():
        expected = twins.twin.get_parameter(clean_name(name)).detach()
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-10)
    shown = [clean_name(name) for name in accelerator.get_state_dict(twins.model)]
    assert shown == list(twins.twin.state_dict())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    return model
