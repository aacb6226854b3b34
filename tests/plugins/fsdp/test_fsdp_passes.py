"""Passes that differ from the first one, under fsdp: recomputed, and compiled, in units of a block
or smaller. Both happen inside of what a unit's hooks do, so neither costs a gather.

tests/core covers recompute bit by bit in one process; tests/plugins/zero what any divided model is
recomputed like: tied, frozen and called twice.
"""

import functools

import pytest
import torch
import torch._inductor.config
from torch.utils.checkpoint import checkpoint

from drivetrain import Accelerator
from drivetrain.parts.naming import clean_name
from drivetrain.testing.conformance.twins import Twins, weights
from drivetrain.testing.models import Case, numbers, squared_error
from towers import Tower

BLOCKS = 4
STRATEGIES = {
    "full": {"name": "fsdp"},
    "grad": {"name": "fsdp", "sharding": "grad"},
    "layers": {"name": "fsdp", "units": "size", "unit_from": 90},
}
PASSES = pytest.mark.parametrize(
    ("strategy", "how"),
    [
        (STRATEGIES["full"], "selective"),
        (STRATEGIES["grad"], "full"),
        (STRATEGIES["layers"], "checkpoint"),
        (STRATEGIES["full"], "reentrant"),
    ],
)


def case(**options):
    factory = functools.partial(Tower, BLOCKS, **options)
    return Case(name="net", factory=factory, batch=numbers, loss=squared_error)


def start(strategy, **options):
    return Accelerator(strategy=dict(strategy), cpu=True, **options)


def calls(accelerator, operation):
    """Return how often all ranks that train the model or a part of them did something."""
    entries = accelerator.traffic.entries()
    return sum(entry.calls for (_, name), entry in entries.items() if name == operation)


# --- recompute ---

AROUND = {
    "full": ({"mode": "full"}, None),
    "selective": ({"mode": "selective"}, None),
    "checkpoint": ({}, functools.partial(checkpoint, use_reentrant=False)),
    "reentrant": ({}, functools.partial(checkpoint, use_reentrant=True)),
}


@PASSES
@pytest.mark.ranks(2)
def test_recompute_costs_no_gather(strategy, how):
    """As many gathers and reductions as without, equal training, and nothing is left whole."""
    sent, ran = [], []
    for options, around in (({}, None), AROUND[how]):
        accelerator = start(strategy, config={"recompute": options} if options else {})
        twins = Twins(accelerator, case(around=around))
        for block in twins.model.blocks:
            block.up.register_forward_pre_hook(lambda *_: ran.append(len(sent)))
        for step in range(3):
            before = [calls(accelerator, o) for o in ("all_gather", "reduce_scatter")]
            twins.backward(step)
            now = [calls(accelerator, o) for o in ("all_gather", "reduce_scatter")]
            units = accelerator.strategy_of(twins.model).placement.units
            assert strategy.get("sharding") == "grad" or not any(u.live_bytes for u in units)
            twins.step()
        twins.check()
        sent.append([b - a for a, b in zip(before, now, strict=True)])
        accelerator.free_memory()
    assert [ran.count(0), ran.count(1)] == [3 * BLOCKS, 2 * 3 * BLOCKS]
    assert sent[1] == sent[0]


@pytest.mark.ranks(2)
def test_peak_of_recomputed_units():
    """Recomputation and backward of a block share its unit: two are whole at most, as without."""
    accelerator = start(STRATEGIES["full"], config={"recompute": {"mode": "full"}})
    twins = Twins(accelerator, case())
    units = [u for u in accelerator.strategy_of(twins.model).placement.units if u.layout.key]
    live = []
    for block in twins.model.blocks:
        block.down.register_forward_pre_hook(lambda *_: live.append(sum(u.live for u in units)))
    for step in range(3):
        twins.backward(step)
        twins.step()
    assert len(live) == 2 * 3 * BLOCKS
    assert max(live) <= 2
    accelerator.free_memory()


# --- compiled ---


def compiled_blocks(model, backend="aot_eager"):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    return model


def compiled_in_place(model, backend="aot_eager"):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def check_compiled(strategy, wrap, change, *, tolerance=1e-10):
    """Train both for some steps; nothing is compiled after the second."""
    accelerator = start(strategy)
    twins = Twins(accelerator, case(), wrap=wrap)
    twins.tolerance = tolerance
    if change is not None:
        change(twins.model)
    for step in range(5):
        twins.backward(step)
        twins.step()
        if step == 1:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    for name, tensor in weights(accelerator, twins.model).items():
        expected = twins.twin.get_parameter(clean_name(name)).detach()
        torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=tolerance)
    shown = [clean_name(name) for name in accelerator.get_state_dict(twins.model)]
    assert shown == list(twins.twin.state_dict())
    accelerator.free_memory()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


COMPILED = pytest.mark.filterwarnings("ignore")  # torch.compile's own


@pytest.mark.parametrize("name", ["full", "grad"])
@pytest.mark.ranks(2)
@COMPILED
def test_compiled_blocks_and_models(name):
    """By the user before prepare or after it, or as a whole: as eager, and no graph per step."""
    check_compiled(STRATEGIES[name], compiled_blocks, None)
    check_compiled(STRATEGIES[name], None, compiled_in_place)
    check_compiled(STRATEGIES[name], functools.partial(torch.compile, backend="aot_eager"), None)


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
@COMPILED
def test_compiled_to_machine_code(monkeypatch):
    """By torch's own compiler."""
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # which it leaves behind
    how = functools.partial(compiled_in_place, backend="inductor")
    with torch._inductor.config.patch(compile_threads=1):  # no pool that outlives the test
        check_compiled(STRATEGIES["full"], None, how)
