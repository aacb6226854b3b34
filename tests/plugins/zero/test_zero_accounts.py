"""Bytes held and bytes sent under ZeRO, against the formulas of the papers and the estimate.

The conformance suite compares ledger, kernel and live tensors with ``cost()``, for the default
options. Here ``cost()`` and all of these are compared with the formulas themselves, for a small
language model whose parameters are really divided, and nothing may grow.
"""

import gc
import importlib.util
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.testing.conformance.twins import everyone

SHARDED = {"name": "zero3", "keep_below": 0, "bucket_mib": 0.1}
STAGES = {
    "zero1": {"name": "zero1", "bucket_mib": 0.1},
    "zero2": {"name": "zero2", "bucket_mib": 0.1},
    "zero3": {"name": "zero3", "bucket_mib": 0.1, "keep_below": 1000},
    "sharded": SHARDED,
}
GPT = Namespace(dim=48, heads=4, layers=4, seq=16, vocab=128)
MASTERS = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}}


def each(strategies):
    return pytest.mark.parametrize("strategy", list(strategies.values()), ids=list(strategies))


class Run:
    """A small GPT under a strategy, with AdamW."""

    def __init__(self, strategy, **options):
        self.before = live_bytes()
        self.accelerator = Accelerator(strategy=strategy, cpu=True, **options)
        self.benchmark = benchmark()
        torch.manual_seed(0)
        built = self.benchmark.Gpt(GPT)
        self.spec = ModelSpec.of(built, states=2)
        self.elements = sum(p.numel() for p in built.parameters())
        self.model, self.optimizer = self.accelerator.prepare(
            built, torch.optim.AdamW(built.parameters(), lr=1e-3)
        )
        self.strategy = self.accelerator.strategy_of(self.model)
        self.generator = torch.Generator().manual_seed(self.accelerator.process_index)

    def steps(self, count, *, zero_grad=True):
        for _ in range(count):
            with self.accelerator.accumulate(self.model):
                tokens = torch.randint(GPT.vocab, (2, GPT.seq + 1), generator=self.generator)
                self.accelerator.backward(self.benchmark.loss_of(self.model, tokens))
                self.optimizer.step()
                if zero_grad:
                    self.optimizer.zero_grad()

    @property
    def cost(self):
        return type(self.strategy).cost(self.strategy.config, self.spec, self.strategy.run)

    def sent(self):
        """Return the ledger's bytes, those of gathers that hide under the next forward too."""
        for unit in self.units():
            unit.wait_for_values()
        return self.accelerator.traffic.sent()

    def units(self):
        return self.strategy.placement.units

    def held(self):
        """Return the bytes of live tensors by kind, gradients among them."""
        parameters = list(self.model.parameters())
        masters = [shard.tensor for shard in self.strategy.shards() if not shard.state]
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        kept = [flat.shard.tensor for unit in self.units() for flat in unit.flats]
        fragments = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {
            "parameters": storage_bytes([*parameters, *masters, *kept, *fragments]),
            "gradients": storage_bytes([*self.strategy.gradients(), *(p.grad for p in parameters)]),
            "optimizer": storage_bytes(states),
        }

    def close(self):
        self.accelerator.free_memory()


def benchmark():
    """Return the benchmark's module, which holds the model."""
    path = Path(__file__).parents[3] / "benchmarks" / "ddp_step.py"
    spec = importlib.util.spec_from_file_location("ddp_step", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def storage_bytes(tensors):
    """Return the bytes of the storages behind tensors, shared ones once."""
    storages = {}
    for tensor in tensors:
        if issubclass(type(tensor), Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            with suppress(RuntimeError):  # of another test: a tensor that has facts and no memory
                storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def live_bytes():
    """Return the bytes of all tensors that Python can reach."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    return storage_bytes([*tensors, *(t.grad for t in tensors if t.is_leaf)])


def formula(name, elements, ranks, *, masters):
    """Return bytes of parameters (with masters), gradients, and Adam's moments on one rank.

    In bf16 forward reads 2 bytes per element, which stage 3 makes of the masters when it gathers;
    gradients of the owned range are fp32, where stage 1 has the whole ones in bf16 besides.
    """
    own = elements / ranks
    if not masters:
        return {
            "zero1": (4 * elements, 4 * elements, 8 * own),
            "zero2": (4 * elements, 4 * own, 8 * own),
            "zero3": (4 * own, 4 * own, 8 * own),
        }[name]
    return {
        "zero1": (2 * elements + 4 * own, 2 * elements + 4 * own, 8 * own),
        "zero2": (2 * elements + 4 * own, 4 * own, 8 * own),
        "zero3": (4 * own, 4 * own, 8 * own),
    }[name]


def check_memory(strategy, world, **options):
    run = Run(strategy, **options)
    run.steps(2)
    run.steps(1, zero_grad=False)
    expected = formula(strategy["name"], run.elements, world, masters=bool(options))
    found = run.held()
    if strategy["name"] == "zero1" and options:
        found["gradients"] += storage_bytes(buffers(run))  # the whole ones, behind fp32 ranges
    for (kind, count), theory in zip(found.items(), expected, strict=True):
        assert count == pytest.approx(theory, rel=0.05), f"{kind}: {count}, theory {theory}"
    masters = strategy["name"] == "zero1" and options  # whole gradients, and fp32 ones of a range
    promised = {k: n for k, n in run.cost.held.items() if k != "lent" or masters}
    assert sum(promised.values()) == pytest.approx(sum(expected), rel=0.05)
    live = live_bytes() - run.before
    lent = run.strategy.reduce.buffers.nbytes
    assert lent <= run.cost.held.get("lent", 0)
    # Three buckets in the ring's hands, on top of what is promised.
    assert live - lent <= 1.05 * sum(expected) + 3 * 0.1 * 2**20, "tensors that nobody counts"
    for unit in run.units():
        assert unit.resident or world == 1 or unit.live_bytes == 0
    run.close()


def buffers(run):
    flats = [f for g in run.strategy.reduce.units for f in g.flats]
    return [flat.buffer for flat in flats if flat.buffer is not None]


@each({key: STAGES[key] for key in ("zero1", "zero2", "sharded")})
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 4)])
def test_memory_is_that_of_the_formulas(strategy, world):
    """Parameters, gradients and moments within 5%, in fp32 and in bf16 with fp32 masters."""
    check_memory(strategy, world)
    check_memory(strategy, world, **MASTERS)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(STAGES["zero1"], id="zero1", marks=pytest.mark.exhaustive),
        pytest.param(STAGES["zero2"], id="zero2", marks=pytest.mark.exhaustive),
        pytest.param(STAGES["zero3"], id="zero3", marks=pytest.mark.exhaustive),
        pytest.param(STAGES["sharded"], id="sharded"),
    ],
)
@pytest.mark.ranks(2)
def test_nothing_grows(strategy):
    """After 200 steps there are as many bytes as after 20, and not one object more per step."""
    run = Run(strategy)
    run.steps(20)
    counts = []
    for steps in (1, 200):
        run.steps(steps)
        counts.append((live_bytes(), len(gc.get_objects())))
    before, after = counts
    assert after[0] <= before[0] + 256, f"bytes and objects grew from {before} to {after}"
    assert after[1] <= before[1] + 199, f"bytes and objects grew from {before} to {after}"
    for unit in run.units():
        assert unit.resident or unit.live_bytes == 0
    run.close()


def check_wire(strategy, world, window):
    run = Run(strategy, gradient_accumulation_steps=window)
    run.steps(window)
    before = run.sent()
    run.steps(2 * window)
    after = run.sent()
    sent = {key: (n - before.get(key, 0)) / 2 for key, n in after.items() if n != before.get(key)}
    total = sum(sent.values())
    share = (world - 1) / world * 4 * run.elements  # bytes
    reductions = 1 if strategy["name"] == "zero1" else window
    times = 3 * window if strategy["name"] == "zero3" else reductions + 1
    assert total <= 1.02 * times * share, f"{total / share} times the parameters, not {times}"
    promised = run.cost.sent
    if run.accelerator.is_main_process:
        if strategy["name"] == "zero3":
            assert total <= sum(promised.values()) <= 1.02 * times * share
        else:
            assert sent == promised
    everyone(None)
    run.close()


@each(STAGES)
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3)])
def test_wire_is_that_of_the_formulas(strategy, world):
    """2 f P elements per step, 3 f P under stage 3, f = (N-1)/N; stages 2 and 3 by micro-batch."""
    for window in (1, 2):
        check_wire(strategy, world, window)


@pytest.mark.ranks(2)
def test_wire_of_other_options():
    """Local windows send once; whole blocks between forward and backward save one gather."""
    for options, times in (
        ({"name": "zero2", "accumulate": "local"}, 2),
        ({**SHARDED, "accumulate": "local"}, 1 + 2 * 2),
        ({**SHARDED, "reshard_after_forward": False}, 2 * 2),
    ):
        run = Run({**options, "bucket_mib": 0.1}, gradient_accumulation_steps=2)
        run.steps(2)
        before = sum(run.sent().values())
        run.steps(2)
        total = sum(run.sent().values()) - before
        share = 2 * run.elements  # bytes
        assert total <= 1.02 * times * share, f"{options}: {total / share} times, not {times}"
        run.close()


@each({"sharded": SHARDED, "one ahead": {**SHARDED, "prefetch": 3}})
@pytest.mark.ranks(2)
def test_few_units_are_whole_at_a_time(strategy):
    """In the middle of a step no more parameters are whole than are used and gathered ahead."""
    run = Run(strategy)
    run.steps(2)
    most = 0

    def count(*_):
        nonlocal most
        units = run.units()
        most = max(most, sum(unit.live_bytes for unit in units))

    handles = [
        module.register_forward_hook(count)
        for module in run.model.modules()
        if isinstance(module, nn.Linear)
    ]
    for parameter in run.model.parameters():
        handles.append(parameter.register_hook(count))
    run.steps(2)
    block = 4 * (12 * GPT.dim**2 + 13 * GPT.dim)
    rest = 4 * (2 * GPT.vocab + GPT.seq + 2) * GPT.dim
    ahead = run.strategy.config.prefetch
    assert most <= 1.01 * ((2 + ahead) * block + rest), f"{most} bytes whole at once"
    for handle in handles:
        handle.remove()
    run.close()
