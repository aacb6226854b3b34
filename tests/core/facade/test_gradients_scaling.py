"""fp16: the scale is agreed by all ranks, and an infinite gradient skips the step everywhere."""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, GradScalerKwargs
from drivetrain.errors import UsageError


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


def test_gradients_of_another_scale_at_hand_do_not_spoil_new_ones():
    accelerator = accelerator_in_fp16(growth_interval=1)
    model, optimizer, _ = build(accelerator)
    other = accelerator.prepare(nn.Linear(4, 1))
    x = torch.full((2, 4), 0.5)
    accelerator.backward(model(x).mean() + other(x).mean())
    optimizer.step()
    assert accelerator.scaler.get_scale() == 2048.0
    accelerator.backward(other(x).mean())  # added to a gradient that carries 1024
    accelerator.clip_grad_norm_(other.parameters(), 100.0)
    assert float(other.weight.grad[0, 0]) == pytest.approx(1.0)
    other.zero_grad()
    accelerator.backward(other(x).mean())
    accelerator.clip_grad_norm_(other.parameters(), 100.0)
    assert float(other.weight.grad[0, 0]) == pytest.approx(0.5)


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
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_infinity_in_an_early_micro_batch_of_one_rank():
    accelerator = accelerator_in_fp16()
    accelerator.gradient_accumulation_steps = 3
    parts = model, optimizer, scheduler = build(accelerator)
    before, rate = model.weight.detach().clone(), scheduler.get_last_lr()
    for i in range(3):
        with accelerator.accumulate(model):
            bad = i == 0 and accelerator.process_index == 1
            step(accelerator, parts, float("inf") if bad else 1.0)
    assert optimizer.step_was_skipped
    assert torch.equal(model.weight, before)
    assert not optimizer.state[model.weight]
    assert scheduler.get_last_lr() == rate
    assert accelerator.scaler.get_scale() == 512.0
    for _ in range(3):
        with accelerator.accumulate(model):
            step(accelerator, parts)
    assert not optimizer.step_was_skipped
    assert not torch.equal(model.weight, before)
    assert scheduler.get_last_lr() != rate
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_scale_at_its_minimum_gives_up_on_every_rank():
    accelerator = accelerator_in_fp16(init_scale=2.0, min_scale=1.0, max_skipped=2)
    parts = build(accelerator)
    infinite = float("nan") if accelerator.process_index == 0 else 1.0
    for _ in range(2):
        step(accelerator, parts, infinite)
    with pytest.raises(UsageError, match="found infinite or NaN ones in the last 2 steps"):
        step(accelerator, parts, infinite)
    accelerator.end_training()


def test_counts_of_bad_steps_are_saved_and_loaded(tmp_path):
    accelerator = accelerator_in_fp16(hysteresis=2)
    step(accelerator, build(accelerator), float("inf"))
    assert accelerator.scaler.get_scale() == 1024.0
    accelerator.save_state(tmp_path / "one")
    again = accelerator_in_fp16(hysteresis=2)
    parts = build(again)
    again.load_state(tmp_path / "one")
    step(again, parts, float("inf"))
    assert again.scaler.get_scale() == 512.0


def test_model_in_fp16_is_refused_at_the_step():
    accelerator = accelerator_in_fp16()
    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).mean())
    with pytest.raises(UsageError, match=r"found 2 of 2 in fp16; give the model in fp32"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_uneven_inputs_are_refused():
    accelerator = accelerator_in_fp16()
    model, _, _ = build(accelerator)
    with (
        pytest.raises(UsageError, match="take bf16, or loaders with even_batches=True"),
        accelerator.join_uneven_inputs([model]),
    ):
        pass
    accelerator.end_training()


def test_one_of_two_optimizers_that_skips_is_told():
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)]
    )
    models = [nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    models[0].weight.register_hook(lambda grad: grad * float("inf"))
    accelerator.backward(sum(model(torch.ones(1, 1)).sum() for model in models))
    first.step()
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
    assert accelerator.optimizer_step_was_skipped
