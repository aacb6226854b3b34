"""Layers that several blocks share, and gradients of gradients, under tensor parallelism."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator, UsageError

WIDTH, INNER = 8, 12


class SharedBlock(nn.Module):
    """Adds the output of layers that every block calls, and of two of its own."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        x = x + self.shared(x)
        return x + self.down(torch.tanh(self.up(x)))


def shared_model():
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))
    blocks = [SharedBlock(shared) for _ in range(2)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks).double()


def critic():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH), nn.Tanh())
        for _ in range(2)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1)).double()


def numbers():
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def mean_square(model, x):
    return model(x).square().mean()


def with_penalty(model, x):
    """Return a critic's loss with a penalty on the norm of its gradient (WGAN-GP)."""
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (gradient.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize(
    ("build", "loss_of"), [(shared_model, mean_square), (critic, with_penalty)]
)
@pytest.mark.ranks(2)
def test_steps_equal_one_process(build, loss_of):
    model, x = build(), numbers()
    twin = copy.deepcopy(model)
    whole = sum(parameter.numel() for parameter in twin.parameters())
    lone = torch.optim.SGD(twin.parameters(), lr=0.1)
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert sum(parameter.numel() for parameter in model.parameters()) < 0.8 * whole
    for _ in range(2):
        expected, loss = loss_of(twin, x), loss_of(model, x)
        expected.backward()
        accelerator.backward(loss)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
        for each in (lone, optimizer):
            each.step()
            each.zero_grad()
    state = accelerator.get_state_dict(model)
    for key, tensor in twin.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-12, atol=1e-12)
    accelerator.free_memory()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.ranks(2)
def test_a_penalty_through_layers_with_one_input_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated()).double()
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="fsdp or zero3"):
        accelerator.backward(with_penalty(model, numbers()))
    accelerator.free_memory()
