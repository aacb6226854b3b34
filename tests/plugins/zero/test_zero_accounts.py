"""Bytes sent by windows under ZeRO, against the formulas of the papers and the estimate.

The conformance suite compares ledger, kernel and live tensors with ``cost()``, for windows of one
micro-batch. Here the bytes of windows are compared with the formulas, and nothing may grow.
"""

import gc

import pytest
import torch
from torch import nn

from drivetrain.cost import ModelSpec
from drivetrain.testing.conformance.twins import everyone
from towers import Block
from zero_stages import SHARDED, start

DIM = 48
DIVIDED = {**SHARDED, "bucket_mib": 0.1}
BY_BUCKETS = [{"name": name, "bucket_mib": 0.1} for name in ("zero1", "zero2")]
FORMS = pytest.mark.parametrize(
    "strategy", [DIVIDED, *BY_BUCKETS], ids=["sharded", "zero1", "zero2"]
)


class Run:
    """Four blocks between two layers, in fp32, under a strategy, with AdamW."""

    def __init__(self, strategy, **options):
        self.accelerator = start(strategy, **options)
        torch.manual_seed(0)
        blocks = (Block(DIM, 4 * DIM) for _ in range(4))
        built = nn.Sequential(nn.Linear(DIM, DIM), *blocks, nn.Linear(DIM, DIM)).float()
        self.spec = ModelSpec.of(built, states=2)
        self.elements = sum(p.numel() for p in built.parameters())
        self.model, self.optimizer = self.accelerator.prepare(
            built, torch.optim.AdamW(built.parameters(), lr=1e-3)
        )
        self.strategy = self.accelerator.strategy_of(self.model)
        self.units = self.strategy.placement.units
        self.cost = type(self.strategy).cost(self.strategy.config, self.spec, self.strategy.run)

    def steps(self, count):
        for _ in range(count):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(torch.randn(2, DIM)).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()

    def sent(self):
        """Return the ledger's bytes, those of gathers that hide under the next forward too."""
        for unit in self.units:
            unit.wait_for_values()
        return self.accelerator.traffic.sent()


@pytest.mark.ranks(2)
def test_nothing_grows():
    """After 50 steps there are not more objects than before, but for less than one per step."""
    run = Run(DIVIDED)
    run.steps(10)
    counts = []
    for steps in (1, 50):
        run.steps(steps)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[1] <= counts[0] + 49, f"objects grew from {counts[0]} to {counts[1]}"
    run.accelerator.free_memory()


@FORMS
@pytest.mark.ranks(2)
def test_wire_is_that_of_the_formulas(strategy):
    """2 f P elements per step, 3 f P under stage 3, f = (N-1)/N; stages 2 and 3 by micro-batch.

    Local windows send once; whole blocks between forward and backward save one gather.
    """
    name = strategy["name"]
    forms = [({}, 1, 3 if name == "zero3" else 2)]
    forms.append(({}, 2, {"zero1": 2, "zero2": 3, "zero3": 6}[name]))
    if name != "zero1":
        forms.append(({"accumulate": "local"}, 2, 5 if name == "zero3" else 2))
    if name == "zero3":
        forms.append(({"reshard_after_forward": False}, 2, 4))
    for options, window, times in forms:
        run = Run({**strategy, **options}, gradient_accumulation_steps=window)
        run.steps(window)
        before = run.sent()
        run.steps(2 * window)
        after = run.sent()
        sent = {k: (n - before.get(k, 0)) / 2 for k, n in after.items() if n != before.get(k)}
        share = 4 * run.elements / 2  # bytes
        total, promised = sum(sent.values()), run.cost.sent
        assert total <= 1.02 * times * share, f"{options}: {total / share}, not {times}"
        if run.accelerator.is_main_process:
            bound = sum(promised.values())
            assert sent == promised if name != "zero3" else total <= bound <= 1.02 * times * share
        everyone(None)
        run.accelerator.free_memory()
