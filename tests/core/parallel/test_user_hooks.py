"""Hooks on parameters where a window or a backward is given up, and ours on nested steps.

What they do to gradients is a matter of ``tests/loops/ways/hooks.py``.
"""

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
