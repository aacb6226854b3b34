"""What an Accelerator does and answers for a script that imports ``accelerate``."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain.compat import accelerate as ours
from drivetrain.errors import UsageError


@pytest.mark.parametrize(
    ("made_by", "gradient"), [(ours.Accelerator, 2.0), (drivetrain.Accelerator, 4.0)]
)
def test_a_short_last_window_is_divided_as_by_accelerate(made_by, gradient):
    accelerator = made_by(cpu=True, gradient_accumulation_steps=2)
    data = TensorDataset(torch.tensor([[1.0], [2.0], [4.0]]))
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1, bias=False), DataLoader(data))
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
        if accelerator.sync_gradients:
            last = model.weight.grad.item()
            model.weight.grad = None
    assert last == gradient


def test_what_is_not_here_names_the_way_out():
    assert ours.Accelerator(cpu=True).fp8_recipe_handler is None

    with pytest.raises(UsageError, match="make one in each process"):
        pickle.dumps(ours.Accelerator(cpu=True))
