"""Optimizers that need whole matrices: refused, unless what they hold stays whole on each rank."""

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.errors import CheckpointError, UsageError
from stacks import Residual, Stack

TP2 = {"name": "megatron", "tp": 2}


def built():
    torch.manual_seed(5)
    return Stack([Residual(8), Residual(8)])


class Factored(torch.optim.Optimizer):
    """Keeps the mean squares of rows and columns alone, as Adafactor does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square = p.grad.square()
                rows = self.state[p].setdefault("rows", square.new_zeros(p.shape[:1]))
                rows.add_(square.view(p.shape[0], -1).mean(1))
                shape = (-1, *[1] * (p.dim() - 1))
                p.sub_(p.grad / (rows.view(shape) + 1e-8).sqrt(), alpha=group["lr"])


REFUSED = ((Factored, False), (torch.optim.Adafactor, True), (torch.optim.LBFGS, False))


@pytest.mark.ranks(2)
def test_optimizer_of_whole_matrices_is_refused():
    for kind, late in REFUSED:
        model = built()
        optimizer = kind(model.parameters())
        accelerator = Accelerator(strategy=TP2, cpu=True)
        match = rf"element-wise optimizer.*{kind.__name__}.*set tp: 1"
        with pytest.raises(UsageError, match=match):
            if late:
                accelerator.prepare(accelerator.prepare(model), optimizer)
            else:
                accelerator.prepare(model, optimizer)
        accelerator.free_memory()


@pytest.mark.ranks(2)
def test_state_of_whole_matrices_is_not_loaded(tmp_path):
    """A checkpoint of one rank may hold it; a rank that has a part of the matrix cannot use it."""
    model = built()
    accelerator = Accelerator(strategy="ddp", cpu=True)
    model, optimizer = accelerator.prepare(model, Factored(model.parameters()))
    accelerator.backward(model(torch.ones(2, 8)).square().mean())
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator = Accelerator(strategy=TP2, cpu=True)
    model = built()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match=r"to have the parameter's shape .*set tp: 1"):
        accelerator.load_state(tmp_path / "state")
    accelerator.free_memory()
