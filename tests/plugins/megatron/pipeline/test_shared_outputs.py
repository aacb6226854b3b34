"""Outputs of training with values on every stage, for loops that read them before backward."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.errors import UsageError

WIDTH = 8


class Scored(nn.Module):
    """Returns scores, which of them are positive, a loss, and hidden states of the first block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, y):
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        scores = self.head(x)
        return {
            "loss": F.cross_entropy(scores, y),
            "scores": scores,
            "positive": scores > 0,
            "hidden": hidden[0],
        }


def prepared(**options):
    strategy = {"name": "megatron", "pp": 2}
    accelerator = Accelerator(strategy=strategy, cpu=True, **options)
    torch.manual_seed(0)
    model, twin = Scored().double(), Scored().double()
    twin.load_state_dict(model.state_dict())
    batch = torch.randn(6, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 1])
    model.example_inputs = batch
    model = accelerator.prepare(model)
    accelerator.strategy_of(model).share_outputs()
    return accelerator, model, twin, batch


def own_loss(output):
    """A loss of the script, which reads values before backward."""
    factor = 2.0 if output["positive"].sum().item() % 2 else 3.0
    return factor * output["scores"].square().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [1, 2])
def test_every_stage_reads_outputs_and_makes_the_loss(steps):
    accelerator, model, twin, batch = prepared(gradient_accumulation_steps=steps)
    for _ in range(steps):
        with accelerator.accumulate(model):
            output, expected = model(*batch), twin(*batch)
            for name in ("scores", "positive"):
                torch.testing.assert_close(output[name], expected[name])
            loss, wanted = own_loss(output), own_loss(expected)
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
            accelerator.backward(loss)
            (wanted / steps).backward()
    whole = dict(twin.named_parameters())
    held = {n: p for n, p in model.named_parameters() if p.grad is not None}
    assert held
    for name, parameter in held.items():
        torch.testing.assert_close(parameter.grad, whole[name].grad)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_loss_of_an_earlier_stages_tensor_is_refused_everywhere():
    accelerator, model, _, batch = prepared()
    output = model(*batch)
    with pytest.raises(UsageError, match="takes the output of an earlier block"):
        accelerator.backward(output["scores"].mean() + output["hidden"].mean())
    accelerator.free_memory()
