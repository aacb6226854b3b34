"""A run that asks for it stops at the first NaN, on every rank, with the place where it arose."""

import math

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, GradScalerKwargs, NonFiniteError


def start(strategy="ddp", stop=True, **options):
    accelerator = Accelerator(
        cpu=True, config={"stop_at_nonfinite": stop, "strategy": strategy}, **options
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step(accelerator, model, optimizer, row, *, clip=True):
    accelerator.backward(model(row).sum())
    if clip:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize("clip", [True, False])
def test_the_loss_of_one_rank_is_named_on_every_rank(strategy, clip):
    accelerator, model, optimizer = start(strategy)
    row = torch.ones(1, 2)
    step(accelerator, model, optimizer, row, clip=clip)
    with accelerator.gathered(model):
        before = [parameter.detach().clone() for parameter in model.parameters()]
    bad = row * math.nan if accelerator.process_index == 1 else row
    with pytest.raises(NonFiniteError) as caught:
        step(accelerator, model, optimizer, bad, clip=clip)
    message = str(caught.value)
    assert "found in step 2: " in message
    assert "rank 1: the loss of micro-batch 1 is nan" in message
    assert "rank 0: the loss" not in message
    with accelerator.gathered(model):
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    accelerator.free_memory()


def test_the_first_parameter_is_named_where_the_loss_is_finite():
    accelerator, model, optimizer = start()
    model[1].weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(NonFiniteError, match=r"rank 0: the gradient of 1\.weight"):
        step(accelerator, model, optimizer, torch.ones(1, 2))


def test_without_the_option_nothing_is_looked_at():
    accelerator, model, optimizer = start(stop=False)
    step(accelerator, model, optimizer, torch.ones(1, 2) * math.nan)
    assert model[1].weight.isnan().all()


def test_an_infinite_gradient_skips_a_step_of_fp16_even_so():
    accelerator, model, optimizer = start(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)]
    )
    model[1].weight.register_hook(lambda grad: grad * math.inf)
    step(accelerator, model, optimizer, torch.ones(1, 2))
    assert optimizer.step_was_skipped
