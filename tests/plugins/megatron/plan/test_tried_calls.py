"""Plans are tried with all that a block gets: other activations, and its call in an evaluation."""

import pytest
import torch
from torch import nn

from cell_twins import Twins
from drivetrain_megatron.plan.trial import run_block
from drivetrain_megatron.recording.calls import Call
from emulated_tensors import close
from stacks import Residual, Stack

WIDTH, INNER, LAYERS = 6, 8, 2


class Gated(Residual):
    """Scales its hidden features by a gate that the model computes once for all blocks."""

    def forward(self, x, gate):
        return x + self.down(self.up(x).tanh() * gate)


class Gates(Stack):
    def __init__(self):
        super().__init__(Gated(WIDTH, INNER) for _ in range(LAYERS))
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return super().forward(x, self.gate(x).sigmoid())


class Remembering(Residual):
    """Keeps its last hidden features in a state, if there is one."""

    def __init__(self, index):
        super().__init__(WIDTH, INNER)
        self.after = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))
        self.index = index

    def forward(self, x, state=None):
        hidden = self.up(x).tanh()
        if state is not None:
            state[:, :, self.index] = hidden[:, -1]
        return self.after(x + self.down(hidden))


class Memories(Stack):
    """Begins with an empty state of the whole width in evaluation, and with none in training."""

    def forward(self, x):
        state = None if self.training else torch.zeros(len(x), INNER, LAYERS, dtype=x.dtype)
        x = super().forward(x, state)
        return x if state is None else x + state.sum()


def numbers():
    return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def test_a_trial_has_the_gradients_of_all_activations():
    block, x, gate = Gated(WIDTH, INNER).double(), numbers(), numbers()[..., :1]
    results = run_block(block, Call((x, gate.requires_grad_()), {}))
    assert [gradient.shape for gradient in results.given] == [x.shape, gate.shape]
    assert all(gradient.abs().max() > 0 for gradient in results.given)


@pytest.mark.ranks(2)
def test_equal_to_one_process():
    for make in (Gates, lambda: Memories(map(Remembering, range(LAYERS)))):
        torch.manual_seed(0)
        model, x = make().double(), numbers()
        model.example_inputs = (x,)
        both = Twins(model, tp=2, loss=lambda model, x: model(x).square().mean())
        both.backward(x)
        both.step()
        with torch.no_grad():
            close(both.model.eval()(x), both.twin.eval()(x))
        both.check_weights()
