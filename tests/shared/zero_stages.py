"""ZeRO and FSDP for tests of awkward loops: strategies, steps of twins, what must be freed."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.parallel.unit import Unit
from drivetrain.testing.conformance.suite import Twins

SMALL = {"bucket_mib": 0.001}
"""Several units even in small models."""

SHARDED = {"name": "zero3", "keep_below": 0}
FSDP = {"name": "fsdp", "unit_from": 10}
STAGES = {
    "sharded": SHARDED,
    "zero1": {"name": "zero1", **SMALL},
    "zero2": {"name": "zero2", **SMALL},
    "zero3": {"name": "zero3", **SMALL},
    "kept": {**SHARDED, "reshard_after_forward": False},
    "matrices": {"name": "zero2", "partition": "parameter", **SMALL},
    "local": {"name": "zero2", "accumulate": "local", **SMALL},
    "sharded local": {**SHARDED, "accumulate": "local"},
    "fsdp": FSDP,
    "fsdp kept": {**FSDP, "reshard_after_forward": False},
    "grad": {**FSDP, "sharding": "grad"},
}

MASTERS = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}}
"""Options of weights in bf16 that are stepped in fp32."""


def each(*names: str) -> pytest.MarkDecorator:
    """Return the mark of a test that gets these stages as ``strategy``, one after the other."""
    return pytest.mark.parametrize("strategy", [STAGES[name] for name in names], ids=names)


def start(strategy: dict[str, Any], **options: Any) -> Accelerator:
    return Accelerator(strategy=strategy, cpu=True, **options)


def units_of(twins: Twins) -> list[Unit]:
    return twins.accelerator.strategy_of(twins.model).placement.units


def calls(accelerator: Accelerator, operation: str) -> int:
    """Return how often an operation was called over ``dp``."""
    entry = accelerator.traffic.entries().get(("dp", operation))
    return entry.calls if entry else 0


def assert_freed(twins: Twins) -> None:
    whole = [u.label for u in units_of(twins) if not u.resident and u.live_bytes]
    assert not whole, f"still whole: {whole}"


def train(twins: Twins, steps: Iterable[int]) -> None:
    """Train both; all divided units are freed after each backward."""
    for step in steps:
        twins.backward(step)
        assert_freed(twins)
        twins.step()
    twins.check()


def train_reducing_once(twins: Twins, steps: Iterable[int]) -> None:
    """Train both; every unit that trains is reduced once in each backward."""
    trained = sum(bool(unit.layout.trainable) for unit in units_of(twins))
    for step in steps:
        loss = twins.loss(step)
        before = calls(twins.accelerator, "reduce_scatter")
        twins.accelerator.backward(loss)
        twins.backward_twin(step)
        assert_freed(twins)
        if twins.axis.size > 1:
            assert calls(twins.accelerator, "reduce_scatter") - before == trained
        twins.step()
    twins.check()


def train_window(twins: Twins, step: int, micros: int) -> None:
    """Train both for a window of micro-batches; all divided units are freed after it."""
    for micro in range(micros):
        with twins.accelerator.accumulate(twins.model):
            twins.backward(micros * step + micro)
            twins.optimizer.step()
            twins.optimizer.zero_grad()
    assert_freed(twins)
    for parameter in twins.twin.parameters():
        if parameter.grad is not None:
            parameter.grad /= micros
    twins.twin_optimizer.step()
    twins.twin_optimizer.zero_grad()


def evaluate(twins: Twins, step: int) -> None:
    """Compare the losses of both without gradients."""
    twins.model.eval()
    with torch.no_grad():
        twins.loss(step)
    twins.model.train()
