"""Hooks on parameters where a window or a backward is given up, and ours on nested steps.

What they do to gradients is a matter of ``tests/loops/ways/hooks.py``.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.testing.models import WIDTH
from stacks import Tower


@pytest.mark.ranks(2)
def test_gradients_of_before_a_window_that_is_given_up_do_not_come_back():
    for strategy in ("ddp", "zero2"):
        accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        handle = model.weight.register_hook(lambda g: g * 0.5)
        inputs = torch.ones(2, 4)

        def window(accelerator=accelerator, model=model, inputs=inputs):
            for _ in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).sum())
            return model.weight.grad.norm().item()

        alone = window()  # and not cleared
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
        accelerator.gradient_state.sync_gradients = True  # as a script does that gives it up
        optimizer.zero_grad()
        assert window() == pytest.approx(alone)

        def fail(*_):
            raise RuntimeError("sprung")

        spring = model.register_full_backward_hook(fail)
        with pytest.raises(RuntimeError, match="sprung"):
            accelerator.backward(model(inputs.requires_grad_()).sum())
        spring.remove()
        accelerator.gradient_state.sync_gradients = True
        optimizer.zero_grad()
        assert window() == pytest.approx(alone)
        handle.remove()
        accelerator.free_memory()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["two models in a window", "windows by no_sync"])
def test_hooks_wait_for_averaged_gradients(way):
    data = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for alone in (True, False):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(nn.Linear(4, 2).double())
        if not alone:
            steps = 2 if way == "two models in a window" else 1
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
            models = accelerator.prepare(*models)
        for model in models:
            model.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        if alone:
            for model in models:
                model(data.flatten(0, 1)).square().mean().backward()
        for micro, batch in enumerate([] if alone else data.chunk(2)):
            mine = batch[accelerator.process_index]
            ends = nullcontext()
            if way == "two models in a window":
                ends = accelerator.accumulate(*models)
            with ends:
                for model in models:
                    local = (
                        accelerator.no_sync(model) if steps == 1 and not micro else nullcontext()
                    )
                    with local:
                        accelerator.backward(model(mine).square().mean() * steps / 2)
        found.append([model.weight.grad.clone() for model in models])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


class Careful(torch.optim.AdamW):
    """Has a step of its own around the one of its base."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", {"name": "local", "workers": "ranks", "every": 2}])
def test_a_step_that_calls_the_one_of_its_base_is_one_step(strategy):
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # torch now calls hooks around both
    found = []
    for kind in (torch.optim.AdamW, Careful):
        torch.manual_seed(0)
        accelerator = Accelerator(strategy=strategy, cpu=True)
        model = Tower()
        model, optimizer = accelerator.prepare(model, kind(model.parameters()))
        for step in range(3):
            torch.manual_seed(10 * step + accelerator.process_index)
            accelerator.backward(model(torch.randn(2, WIDTH, dtype=torch.float64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        sent = dict(accelerator.traffic.sent())
        found.append((sent, {n: p.clone() for n, p in accelerator.get_state_dict(model).items()}))
        accelerator.free_memory()
    (sent, weights), (again, others) = found
    assert sent == again
    torch.testing.assert_close(weights, others, rtol=0, atol=0)
