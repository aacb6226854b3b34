"""fp16: the scale is agreed by all ranks, and an infinite gradient skips the step everywhere."""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, GradScalerKwargs


def accelerator_in_fp16(**options):
    defaults = {"init_scale": 1024.0, "growth_interval": 2}
    return Accelerator(
        cpu=True,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(**(defaults | options))],
    )


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


def test_gradients_are_unscaled_before_clipping():
    accelerator = accelerator_in_fp16()
    model, _, _ = build(accelerator)
    accelerator.backward(model(torch.full((2, 4), 0.5)).mean())
    assert float(model.weight.grad[0, 0]) == pytest.approx(512.0)
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
    assert float(norm) == pytest.approx((4 * 0.25 + 1) ** 0.5)
    assert float(model.weight.grad[0, 0]) == pytest.approx(0.5)


@pytest.mark.ranks(2)
def test_infinity_on_one_rank_skips_the_step_on_all():
    accelerator = accelerator_in_fp16()
    parts = model, optimizer, scheduler = build(accelerator)
    step(accelerator, parts)
    weights = model.weight.detach().clone()
    state = {k: v.clone() for k, v in optimizer.state[model.weight].items()}
    rate = scheduler.get_last_lr()
    step(accelerator, parts, scale=float("inf") if accelerator.process_index == 1 else 1.0)
    assert accelerator.optimizer_step_was_skipped
    assert optimizer.step_was_skipped
    assert torch.equal(model.weight, weights)
    assert all(torch.equal(v, state[k]) for k, v in optimizer.state[model.weight].items())
    assert scheduler.get_last_lr() == rate
    assert accelerator.scaler.get_scale() == 512.0
    step(accelerator, parts)
    assert not accelerator.optimizer_step_was_skipped
    assert not torch.equal(model.weight, weights)
    accelerator.end_training()


def test_scale_grows_and_grown_scale_is_not_used_for_old_gradients():
    accelerator = accelerator_in_fp16(growth_interval=1)
    model, optimizer, _ = build(accelerator)
    other = accelerator.prepare(nn.Linear(4, 1))
    x = torch.full((2, 4), 0.5)
    accelerator.backward(model(x).mean() + other(x).mean())
    optimizer.step()
    assert accelerator.scaler.get_scale() == 2048.0
    accelerator.clip_grad_norm_(other.parameters(), 100.0)
    assert float(other.weight.grad[0, 0]) == pytest.approx(0.5)


def test_overflow_inside_a_window_skips_its_step():
    accelerator = accelerator_in_fp16()
    accelerator.gradient_accumulation_steps = 2
    parts = model, _, _ = build(accelerator)
    before = model.weight.detach().clone()
    for scale in (float("inf"), 1.0):
        with accelerator.accumulate(model):
            step(accelerator, parts, scale)
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(model.weight, before)
    assert accelerator.scaler.get_scale() == 512.0


def test_scale_is_saved_and_loaded(tmp_path):
    accelerator = accelerator_in_fp16(growth_interval=1)
    step(accelerator, build(accelerator))
    accelerator.save_state(tmp_path / "one")
    again = accelerator_in_fp16(growth_interval=1)
    build(again)
    again.load_state(tmp_path / "one")
    assert again.scaler.get_scale() == 2048.0
