"""Hooks on parameters where a window or a backward is given up.

What they do to gradients is a matter of ``tests/loops/ways/hooks.py``.
"""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator


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
