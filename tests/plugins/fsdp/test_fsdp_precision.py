"""Low precision under fsdp: all dtypes of a unit travel at once, and skipped steps leave no mark.

The conformance suite compares a precision with one process; here are what is peculiar to units, and
the ways of sharding that keep values or gradients longer.
"""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, GradScalerKwargs
from drivetrain.testing.conformance.low_twins import LowTwins, copies_loss, in_fp32
from drivetrain.testing.conformance.twins import everyone, weights
from drivetrain.testing.models import HIDDEN, OUT, WIDTH, Case, numbers, squared_error

STRATEGIES = {
    "full": (2, {}),
    "grad": (2, {"sharding": "grad"}),
    "local": (2, {"accumulate": "local"}),
    "hybrid": (4, {"sharding": "hybrid", "shard_size": 2}),
    "hybrid-local": (4, {"sharding": "hybrid", "shard_size": 2, "accumulate": "local"}),
}
EACH = pytest.mark.parametrize(
    "options",
    [pytest.param(o, marks=pytest.mark.ranks(n), id=name) for name, (n, o) in STRATEGIES.items()],
)
LOW = torch.bfloat16


class Block(nn.Module):
    """Matrices and vectors: with low parameters, two dtypes side by side."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, OUT)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


CASE = in_fp32(Case(name="net", factory=Net, batch=numbers, loss=squared_error))


def start(options, precision, **others):
    strategy = {"name": "fsdp", **options}
    return Accelerator(strategy=strategy, cpu=True, mixed_precision=precision, **others)


def sent(accelerator, operation):
    entries = accelerator.traffic.entries()
    found = [entry for (_, name), entry in entries.items() if name == operation]
    return sum(entry.calls for entry in found), sum(entry.bytes for entry in found)


REDUCED = {"bf16": (2, 2), "fp32": (4, 4), "as_given": (2, 4)}
"""Bytes per element of a gradient on the wire: of a matrix and of a vector."""


@pytest.mark.parametrize("reduce", list(REDUCED))
@EACH
def test_two_dtypes_travel_as_one(options, reduce):
    """Shards in fp32 are the masters; what travels is cast, all kinds of a unit in one go."""
    config = {"dtypes": {"param": "bf16", "reduce": reduce}}
    accelerator = start(options, "bf16", config=config)
    twins = LowTwins(accelerator, CASE, copies_loss(CASE, LOW), rounding=1e-5)
    strategy = accelerator.strategy_of(twins.model)
    for unit in strategy.placement.units:
        assert {(f.dtype, f.master) for f in unit.layout.flats} == {
            (LOW, torch.float32),
            (torch.float32, torch.float32),
        }
    twins.train(0, [1.0])
    before = [sent(accelerator, o) for o in ("all_gather", "reduce_scatter")]
    twins.train(1, [1.0])
    gathers, reductions = (
        [b - a for a, b in zip(old, sent(accelerator, o), strict=True)]
        for old, o in zip(before, ("all_gather", "reduce_scatter"), strict=True)
    )
    units = len(strategy.placement.units)
    assert units == 3
    assert gathers[0] == units
    assert reductions[0] == units
    matrices = sum(p.numel() for p in CASE.build().parameters() if p.dim() > 1)
    vectors = sum(p.numel() for p in CASE.build().parameters() if p.dim() < 2)
    for found, sizes in ((gathers[1], (2, 4)), (reductions[1], REDUCED[reduce])):
        whole = sum(everyone(found)) / (accelerator.num_processes // 2)
        assert whole == matrices * sizes[0] + vectors * sizes[1]
    twins.check(0.05, rounded=2.0**-8)
    accelerator.free_memory()


@EACH
def test_skipped_step_leaves_no_mark(options):
    """After infinity on one rank, training goes on bit for bit as if that step had not been."""
    found = []
    for steps in ((0, "bad", 1), (0, 1)):
        scaler = GradScalerKwargs(init_scale=1024.0, growth_interval=100)
        accelerator = start(
            options, "fp16", gradient_accumulation_steps=2, kwargs_handlers=[scaler]
        )
        built = CASE.build()
        optimizer = torch.optim.AdamW(built.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(built, optimizer)
        for step in steps:
            train(accelerator, model, optimizer, step)
            assert set(everyone(accelerator.optimizer_step_was_skipped)) == {step == "bad"}
        found.append(weights(accelerator, model))
        accelerator.free_memory()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


def train(accelerator, model, optimizer, step):
    """Run a window of two; in a bad one the last rank's first loss has infinite gradients."""
    rank = accelerator.process_index
    bad = step == "bad" and rank == accelerator.num_processes - 1
    number = 7 if step == "bad" else step
    for i in range(2):
        with accelerator.accumulate(model):
            loss = CASE.loss(model, CASE.batch(2 * number + i, rank))
            accelerator.backward(loss * (float("inf") if bad and i == 0 else 1.0))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_without_masters():
    """The low shards themselves are updated, and saved, as in one process with such weights."""
    config = {"dtypes": {"param": "bf16", "master": "none"}}
    accelerator = start({}, "bf16", config=config)
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
                outputs = twin(CASE.batch(step, rank).inputs)
            loss = nn.functional.mse_loss(outputs.double(), CASE.batch(step, rank).targets)
            (loss / axis.size).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    held = [p.dtype for group in optimizer.param_groups for p in group["params"]]
    assert set(held) == {LOW, torch.float32}
    found = accelerator.get_state_dict(model)
    for name, tensor in twin.state_dict().items():
        assert found[name].dtype is tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=2e-2, atol=2e-3)
    accelerator.free_memory()
