"""Local SGD: ranks step alone and average; ``model.no_sync`` of a prepared model."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, LocalSGD, UsageError

RANKS, EVERY, STEPS, RATE = 2, 2, 5, 0.1
pytestmark = pytest.mark.ranks(RANKS)


def rows(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def loss_of(model, x):
    return model(x).square().sum(dim=1).mean()


def averaged_by_hand():
    """Algorithm 1 of the paper in one process, with a model for each rank."""
    models = [linear() for _ in range(RANKS)]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rows(step, rank)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=RATE)
        if (step + 1) % EVERY == 0 or step == STEPS - 1:
            mean = [sum(p) / RANKS for p in zip(*(m.parameters() for m in models), strict=True)]
            for model in models:
                for parameter, value in zip(model.parameters(), mean, strict=True):
                    parameter.data.copy_(value)
    return models[0]


@pytest.mark.parametrize("strategy", ["ddp", "plain"])
def test_ranks_step_alone_and_average(strategy):
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    with LocalSGD(accelerator, model, EVERY) as local_sgd:
        for step in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, rows(step, accelerator.process_index)))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    torch.testing.assert_close(
        [*model.parameters()], [*averaged_by_hand().parameters()], rtol=1e-12, atol=1e-14
    )


def test_what_cannot_average_is_refused():
    for strategy in ("zero1", "zero3", "fsdp", "ddp"):
        accelerator = Accelerator(cpu=True, strategy=strategy)
        model = linear()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
        divided = strategy != "ddp"
        said = "expected a strategy whose ranks can step by them" if divided else "found 0"
        with pytest.raises(UsageError, match=said):
            LocalSGD(accelerator, model, EVERY if divided else 0)
        LocalSGD(accelerator, model, EVERY, enabled=False)
        accelerator.free_memory()


def test_no_sync_of_a_prepared_model_keeps_gradients_local():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(linear())
    own = linear()
    loss_of(own, rows(0, accelerator.process_index)).backward()
    with model.no_sync():
        accelerator.backward(loss_of(model, rows(0, accelerator.process_index)))
        torch.testing.assert_close(model.weight.grad, own.weight.grad, rtol=1e-12, atol=1e-14)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss_of(model, rows(1, accelerator.process_index)))
    first, second = accelerator.gather(model.weight.grad[None])
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert isinstance(deepcopy(model).no_sync(), nullcontext)
    accelerator.free_memory()
    assert not hasattr(model, "no_sync")
