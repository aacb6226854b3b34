"""The levels of a pipeline in the script's loop: what the model returns may be used as ever."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.testing.conformance.twins import everyone

WIDTH = 8


class Illustrated(nn.Module):
    """Returns what it makes before its blocks, too, as models of images and text do."""

    def __init__(self):
        super().__init__()
        self.image = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(2)
        )

    def forward(self, left, right):
        features = self.image(right)
        x = left + features
        for block in self.blocks:
            x = block(x)
        return x, features


def prepared():
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2}, cpu=True, gradient_accumulation_steps=2
    )
    torch.manual_seed(0)
    model, twin = Illustrated(), Illustrated()
    twin.load_state_dict(model.state_dict())
    loader = DataLoader(TensorDataset(torch.randn(8, WIDTH), torch.randn(8, WIDTH)), 4)
    return accelerator, *accelerator.prepare(model, loader), twin


@pytest.mark.ranks(2)
def test_an_output_of_an_early_stage_may_lie_on_the_way_of_its_gradient():
    accelerator, model, loader, twin = prepared()
    for left, right in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(left, right)[0].square().mean())
        (twin(left, right)[0].square().mean() / 2).backward()
    whole = dict(twin.named_parameters())
    held = {n: p for n, p in model.named_parameters() if p.grad is not None}
    assert held
    for name, parameter in held.items():
        torch.testing.assert_close(parameter.grad, whole[name].grad)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_backward_of_the_scripts_own_is_refused():
    accelerator, model, loader, _ = prepared()
    left, right = next(iter(loader))
    output, features = model(left, right)
    mine = features if accelerator.is_main_process else output
    with pytest.raises(UsageError, match="found a backward of its own on what a pipeline"):
        mine.sum().backward()
    accelerator.wait_for_everyone()  # the last rank has what the first one sends
    accelerator.free_memory()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.ranks(2)
def test_gradients_of_gradients_are_refused_alike_on_all_stages(accumulation):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model.example_inputs = torch.ones(4, 4)
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2}, cpu=True, gradient_accumulation_steps=accumulation
    )
    model = accelerator.prepare(model)
    x = torch.ones(4, 4, requires_grad=True)
    with accelerator.accumulate(model):
        scores = model(x)
        with pytest.raises(UsageError, match="a gradient penalty") as error:
            torch.autograd.grad(scores.sum(), x, create_graph=True)
    assert len(set(everyone(str(error.value)))) == 1
    accelerator.backward(scores.sum())  # the refused call leaves all usable
    everyone(None)
    accelerator.free_memory()
