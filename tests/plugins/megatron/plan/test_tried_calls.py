"""Plans are tried with all that a block gets: other activations, and its call in an evaluation."""

import copy

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain_megatron.plan.trial import run_block
from drivetrain_megatron.recording.calls import Call

WIDTH, INNER, LAYERS = 6, 8, 2


class Gated(nn.Module):
    """Scales its hidden features by a gate that the model computes once for all blocks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x, gate):
        return x + self.down(self.up(x).tanh() * gate)


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Gated() for _ in range(LAYERS))

    def forward(self, x):
        gate = self.gate(x).sigmoid()
        for block in self.blocks:
            x = block(x, gate)
        return x


class Remembering(nn.Module):
    """Keeps its last hidden features in a state, if there is one."""

    def __init__(self, index):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.after = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))
        self.index = index

    def forward(self, x, state=None):
        hidden = self.up(x).tanh()
        if state is not None:
            state[:, :, self.index] = hidden[:, -1]
        return self.after(x + self.down(hidden))


class Memories(nn.Module):
    """Begins with an empty state of the whole width in evaluation, and with none in training."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Remembering(index) for index in range(LAYERS))

    def forward(self, x):
        state = None if self.training else torch.zeros(len(x), INNER, LAYERS, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, state)
        return x if state is None else x + state.sum()


def numbers():
    return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def test_a_trial_has_the_gradients_of_all_activations():
    block, x, gate = Gated().double(), numbers(), numbers()[..., :1]
    results = run_block(block, Call((x, gate.requires_grad_()), {}))
    assert [gradient.shape for gradient in results.given] == [x.shape, gate.shape]
    assert all(gradient.abs().max() > 0 for gradient in results.given)


@pytest.mark.parametrize("make", [Gates, Memories])
@pytest.mark.ranks(2)
def test_equal_to_one_process(make):
    torch.manual_seed(0)
    model, x = make().double(), numbers()
    model.example_inputs = (x,)
    twin = copy.deepcopy(model)
    lone = torch.optim.SGD(twin.parameters(), lr=0.1)
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    twin(x).square().mean().backward()
    accelerator.backward(model(x).square().mean())
    lone.step()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), twin.eval()(x), rtol=1e-10, atol=1e-12)
    state = accelerator.get_state_dict(model)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
    accelerator.free_memory()
