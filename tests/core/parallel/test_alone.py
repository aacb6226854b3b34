"""One rank alone: gradients become those of fragments as autograd has made them."""

import torch
from torch import nn
from torch.optim import SGD

from stacks import Parts
from zero_stages import MASTERS, each, start

ALONE = each("zero1", "zero2", "sharded", "fsdp")


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


@ALONE
def test_windows_onto_gradients_that_are_there(strategy):
    """The third is cleared in its middle; one gradient is replaced by the script."""
    accelerator = start(strategy, gradient_accumulation_steps=2)
    given, twin = summed(), summed()
    model, optimizer = accelerator.prepare(given, SGD(given.parameters(), lr=0.1))
    other = SGD(twin.parameters(), lr=0.1)
    for number in range(8):
        batch = torch.randn(2, 4, dtype=torch.float64)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            (twin(batch).square().mean() / 2).backward()
            if number == 4:
                model.zero_grad()
                twin.zero_grad()
        if number in (3, 7):
            for one in (model, twin):
                one.turned.grad = one.turned.grad * 2
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
    found = accelerator.get_state_dict(model)
    torch.testing.assert_close(found, dict(twin.state_dict()), rtol=1e-12, atol=1e-12)


@ALONE
def test_masters_keep_updates_that_forward_rounds_away(strategy):
    accelerator = start(strategy, **MASTERS)
    linear = nn.Linear(4, 4, bias=False)
    nn.init.ones_(linear.weight)
    model, optimizer = accelerator.prepare(linear, SGD(linear.parameters(), lr=5e-4))
    for _ in range(10):
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    weight = accelerator.get_state_dict(model)["weight"].float()
    torch.testing.assert_close(weight, torch.full((4, 4), 0.99), rtol=0, atol=0.003)
