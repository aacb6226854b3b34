"""One rank alone: gradients become those of fragments as autograd has made them."""

import copy

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from stacks import Parts


def summed():
    """Return a model of which two parameters get one gradient, and one lies transposed."""
    torch.manual_seed(0)
    first, second, turned = torch.randn(3, 4, 4, dtype=torch.float64)
    return Parts(
        lambda m, x: x @ (m.first + m.second) @ m.turned,
        first=nn.Parameter(first),
        second=nn.Parameter(second),
        turned=nn.Parameter(turned.t()),
    )


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp"])
def test_windows_onto_gradients_that_are_there(strategy):
    options = {"zero3": {"keep_below": 0}, "fsdp": {"unit_from": 1}}.get(strategy, {})
    strategy = {"name": strategy, **options}
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    given, twin = summed(), summed()
    model, optimizer = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for window in range(4):
        for micro in range(2):
            batch = torch.randn(2, 4, dtype=torch.float64)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if window == 2 and not micro:
                    model.zero_grad()
            (twin(batch).square().mean() / 2).backward()
            if window == 2 and not micro:
                twin.zero_grad()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine.grad.tolist()), theirs.grad.float())
        if window % 2:
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
    found = accelerator.get_state_dict(model)
    torch.testing.assert_close(found, copy.deepcopy(twin.state_dict()), rtol=1e-12, atol=1e-12)
    accelerator.free_memory()
