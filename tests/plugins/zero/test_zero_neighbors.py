"""Units that few neighbors keep between forward and backward: ``reshard_after_forward: 2``."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain.cost import ModelSpec
from drivetrain.testing.conformance.suite import Twins, adamw
from drivetrain.testing.models import CASES
from zero_stages import SHARDED, start

pytestmark = pytest.mark.ranks(4)


NEIGHBORS = {**SHARDED, "reshard_after_forward": 2}


def test_trains_like_one_process():
    """What neighbors kept of the old values is dropped by a step without backward in between."""
    for name in ("mlp", "tied", "odd_shapes", "called_twice", "recomputed", "mixed_dtypes"):
        accelerator = start(NEIGHBORS)
        twins = Twins(accelerator, CASES[name], adamw)
        for step in range(2):
            twins.backward(step)
            if name == "mlp":
                twins.case.loss(twins.model, twins.case.batch(0, 0))  # never goes backward
            twins.step()
        twins.check()


def test_backward_gathers_from_neighbors():
    """Between forward and backward half of a unit is kept; the other half comes from next door."""
    accelerator = start(NEIGHBORS)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    spec = ModelSpec.of(model)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    strategy = accelerator.strategy_of(model)
    promised = type(strategy).cost(strategy.config, spec, strategy.run).sent
    units = strategy.placement.units
    inputs = torch.randn(2, 64)  # so backward reads no weight of the first layer
    for _ in range(2):  # the first step does not know yet which unit forward ends with
        accelerator.traffic.clear()
        loss = model(inputs).square().mean()
        left = [unit for unit in units if unit.near is not None]
        for unit in left:
            held = sum(kept.untyped_storage().nbytes() for kept in unit.near._kept)
            assert held == unit.layout.nbytes / 2
            assert unit.live_bytes == 0
        accelerator.backward(loss)
        assert not any(unit.near is not None for unit in units), "kept after backward"
        optimizer.step()
    assert len(left) == len(units) - 2, "the last one and the one before it stay whole"
    sent = accelerator.traffic.sent().items()
    assert {key: count for key, count in sent if count} == promised
