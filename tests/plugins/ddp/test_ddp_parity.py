"""Ddp on N ranks equals one process that sees all batches, in fp64, on awkward models."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run
from drivetrain.testing.models import CASES, Case
from drivetrain.traffic import Traffic
from drivetrain_ddp import Ddp, DdpConfig

STEPS = 3


def make_run(accumulation: int = 1) -> Run:
    world = World.discover(cpu=True)
    return Run(
        world=world,
        mesh=Mesh.build(Ddp.axes(DdpConfig(), world.size), world),
        precision=Precision.of("no"),
        accumulation=accumulation,
        traffic=Traffic(),
    )


def reference(
    case: Case, ranks: int, steps: int, optimize: Callable[[nn.Module], Optimizer]
) -> nn.Module:
    """Train in one process: buffers follow rank 0, losses are averaged over ranks."""
    model = case.build()
    optimizer = optimize(model)
    for step in range(steps):
        optimizer.zero_grad()
        replicas = [deepcopy(model) for _ in range(ranks)]
        grads: dict[str, torch.Tensor] = {}
        for rank, replica in enumerate(replicas):
            replica.zero_grad()
            (case.loss(replica, case.batch(step, rank)) / ranks).backward()
            for name, parameter in replica.named_parameters():
                if parameter.grad is not None:
                    grads[name] = grads.get(name, 0) + parameter.grad
        for name, parameter in model.named_parameters():
            parameter.grad = grads.get(name)
        for mine, theirs in zip(model.buffers(), replicas[0].buffers(), strict=True):
            mine.copy_(theirs)
        optimizer.step()
    return model


def adam(model: nn.Module) -> Optimizer:
    return Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        tolerance = 1e-9 if mine.dtype is torch.float64 else 2e-2
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def train(case: Case, config: DdpConfig, steps: int = STEPS) -> tuple[nn.Module, Ddp]:
    run = make_run()
    strategy = Ddp(config, run)
    model = case.build()
    optimizer = adam(model)
    if run.world.rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)  # prepare must undo it
    prepared = strategy.prepare(model, [optimizer])
    assert prepared.model is model
    for step in range(steps):
        optimizer.zero_grad()
        strategy.backward(case.loss(model, case.batch(step, run.world.rank)))
        optimizer.step()
    return model, strategy


SMALL = DdpConfig(bucket_mib=0.0015, first_bucket_mib=0.001)


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("config", [DdpConfig(), SMALL], ids=["one-bucket", "small-buckets"])
@pytest.mark.ranks(2)
def test_two_ranks_equal_one_process(name: str, config: DdpConfig):
    case = CASES[name]
    model, strategy = train(case, config)
    assert_same(model, reference(case, 2, STEPS, adam))
    strategy.close()
