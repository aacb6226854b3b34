"""fp16: the scale is agreed by all ranks, and an infinite gradient skips the step everywhere."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, GradScalerKwargs
from drivetrain.errors import UsageError
from drivetrain.facade.gradients import KeptGradient
from drivetrain.facade.stepping import PreparedScheduler


def accelerator_in_fp16(**options):
    defaults = {"init_scale": 1024.0, "growth_interval": 2}
    handlers = [GradScalerKwargs(**(defaults | options))]
    return Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)


def build(accelerator):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return accelerator.prepare(model, optimizer, scheduler)


def step(accelerator, parts, scale=1.0):
    model, optimizer, scheduler = parts
    loss = model(torch.full((2, 4), 0.5)).mean() * scale
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def test_gradients_of_another_scale_at_hand_do_not_spoil_new_ones():
    accelerator = accelerator_in_fp16(growth_interval=1)
    model, optimizer, _ = build(accelerator)
    other = accelerator.prepare(nn.Linear(4, 1))
    x = torch.full((2, 4), 0.5)
    accelerator.backward(model(x).mean() + other(x).mean())
    optimizer.step()
    assert accelerator.scaler.get_scale() == 2048.0
    for expected in (1.0, 0.5):  # the first is added to a gradient that carries 1024
        accelerator.backward(other(x).mean())
        accelerator.clip_grad_norm_(other.parameters(), 100.0)
        assert float(other.weight.grad[0, 0]) == pytest.approx(expected)
        other.zero_grad()


def test_backward_after_clipping_adds_to_what_is_unscaled():
    accelerator = accelerator_in_fp16()
    model, _, _ = build(accelerator)
    x = torch.full((2, 4), 0.5)
    for expected in (0.5, 1.0):
        accelerator.backward(model(x).mean())
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        assert float(model.weight.grad[0, 0]) == pytest.approx(expected)


def test_step_after_growth_divides_by_the_scale_of_its_gradients():
    """DeepSpeed divides by the grown scale: the gradients of a growth step are halved."""
    results = []
    for interval in (1, 1000):
        accelerator = accelerator_in_fp16(growth_interval=interval)
        parts = build(accelerator)
        for _ in range(3):
            step(accelerator, parts)
        results.append(parts[0].weight.detach().clone())
        assert accelerator.scaler.get_scale() == (8192.0 if interval == 1 else 1024.0)
    assert torch.equal(*results)


@pytest.mark.ranks(2)
def test_infinite_gradients_of_what_no_optimizer_has_skip_no_step():
    accelerator = accelerator_in_fp16()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    skipped = []
    for factor in (1.0, float("inf") if accelerator.process_index else 1.0, 1.0, 1.0):
        accelerator.backward(model(torch.ones(2, 4)).mean() * factor)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        optimizer.zero_grad()
    assert skipped == [False, True, False, False]
    assert accelerator.scaler.get_scale() == 1024.0  # halved once, grown after two good steps


@pytest.mark.ranks(2)
def test_hysteresis_of_two_optimizers_with_infinity_on_one_rank():
    accelerator = accelerator_in_fp16(hysteresis=2, growth_interval=1000)
    one, two = build(accelerator), build(accelerator)
    infinite = float("inf") if accelerator.process_index == 1 else 1.0
    scales, skipped = [], []
    for _ in range(3):
        step(accelerator, one, infinite)
        step(accelerator, two)
        scales.append(accelerator.scaler.get_scale())
        skipped.append((one[1].step_was_skipped, two[1].step_was_skipped))
    assert scales == [1024.0, 512.0, 256.0]
    assert skipped == [(True, False)] * 3
    assert accelerator.scaler.state_dict()["bad_steps"] == {"0": 3, "1": 0}


@pytest.mark.ranks(2)
def test_models_in_fp16_and_uneven_inputs_are_refused():
    accelerator = accelerator_in_fp16()
    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).mean())
    with pytest.raises(UsageError, match=r"found 2 of 2 in fp16; give the model in fp32"):
        optimizer.step()
    refused = pytest.raises(UsageError, match="take bf16, or loaders with even_batches=True")
    with refused, accelerator.join_uneven_inputs([model]):
        pass
    accelerator.end_training()


def test_one_of_two_optimizers_that_skips_is_told():
    accelerator = accelerator_in_fp16()
    models = [nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    models[0].weight.register_hook(lambda grad: grad * float("inf"))
    accelerator.backward(sum(model(torch.ones(1, 1)).sum() for model in models))
    first.step()
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
    assert accelerator.optimizer_step_was_skipped
    schedule = mock.Mock(total_steps=None)
    PreparedScheduler(schedule, [first, second], accelerator.gradient_state).step()
    schedule.step.assert_not_called()


def test_a_kept_gradient_of_another_scale_is_restored_in_the_scale_of_now():
    gradient = torch.full((2,), 1.0 * 64)
    entry = SimpleNamespace(
        scale=64.0,
        strategy=SimpleNamespace(gradients=lambda _: [gradient]),
        hooks=SimpleNamespace(earlier={}),
    )
    kept = KeptGradient(entry, nn.Parameter(torch.zeros(2)))
    entry.scale = 128.0
    gradient.copy_((1.0 + 2.0) * 128 * 0.5 * torch.ones(2))  # two more have come; halved together
    kept.restore(0.5)
    assert torch.equal(gradient, torch.full((2,), (1.0 + 2.0 * 0.5) * 128))
