"""Schedule-free optimizers write into parameters outside of steps; every rank sees the values."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from drivetrain import Accelerator


class ScheduleFree(torch.optim.Optimizer):
    """SGD that trains at y, between z, which it steps, and their average x, which is evaluated."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "training": False})

    def train(self):
        self._go(True, lambda group: 1 - group["beta"])

    def eval(self):
        self._go(False, lambda group: 1 - 1 / group["beta"])

    @torch.no_grad()
    def _go(self, training, share):
        for group in self.param_groups:
            for p in group["params"]:
                if group["training"] is not training and p in self.state:
                    p.lerp_(self.state[p]["z"], share(group))
            group["training"] = training

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["training"], "step() in evaluation mode"
            group["steps"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["steps"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["steps"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(4, 2, 6).double(), torch.randn(4, 2, 3).double()
    return model, ScheduleFree(model.parameters()), inputs, targets


def outputs(model, optimizer, inputs, targets, backward=torch.Tensor.backward):
    """Train two steps at a time; evaluate after each two, and in training mode again."""
    found = []
    for i, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        optimizer.train()
        backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if i % 2:
            for switch in (optimizer.eval, optimizer.train):
                switch()
                with torch.no_grad():
                    found.append(model(torch.ones(1, 6).double()))
    return torch.cat(found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp"])
def test_switches_change_the_parameters_of_every_rank(tmp_path, strategy):
    """Also those of a layer that is frozen when a run resumes."""

    def evaluated(model, optimizer):
        optimizer.eval()
        with torch.no_grad():
            return model(torch.ones(1, 6).double())

    plain = made()
    expected = outputs(*plain)
    assert not torch.allclose(expected[0], expected[1])
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model, optimizer, inputs, targets = made()
    model, optimizer = accelerator.prepare(model, optimizer)
    mine = slice(accelerator.process_index, accelerator.process_index + 1)
    found = outputs(model, optimizer, inputs[:, mine], targets[:, mine], accelerator.backward)
    torch.testing.assert_close(found, expected)
    accelerator.save_state(tmp_path)
    accelerator.free_memory()
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model, optimizer, *_ = made()
    model[0].requires_grad_(strategy == "zero1")
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(evaluated(model, optimizer), evaluated(*plain[:2]))
