"""The levels of a pipeline in the script's loop: what the model returns may be used as ever."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.twins import everyone
from stacks import Residual
from staged_twins import EXACT, Twins

WIDTH = 8


class Illustrated(nn.Module):
    """Returns what it makes before its blocks, too, as models of images and text do."""

    def __init__(self):
        super().__init__()
        self.image = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(2))

    def forward(self, left, right):
        features = self.image(right)
        x = left + features
        for block in self.blocks:
            x = block(x)
        return x, features


def illustrated():
    torch.manual_seed(0)
    pairs = torch.randn(2, 2, 4, WIDTH, dtype=torch.float64)
    return Twins(Illustrated().double(), tuple(pairs[0]), accumulation=2), pairs


@pytest.mark.ranks(2)
def test_an_output_of_an_early_stage_may_lie_on_the_way_of_its_gradient():
    both, pairs = illustrated()
    for pair in pairs:
        with both.accelerator.accumulate(both.model):
            both.backward(*(x.square().mean() for x, _ in both(*pair)))
    both.check_gradients()
    output, features = both.model(*pairs[0])
    mine = features if both.accelerator.is_main_process else output
    with pytest.raises(UsageError, match="found a backward of its own on what a pipeline"):
        mine.sum().backward()
    both.close()  # together: the last rank has what the first one sends


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.ranks(2)
def test_gradients_of_gradients_are_refused_alike_on_all_stages(accumulation):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    both = Twins(model, torch.ones(4, 4), accumulation=accumulation)
    x = torch.ones(4, 4, requires_grad=True)
    with both.accelerator.accumulate(both.model):
        scores = both.model(x)
        with pytest.raises(UsageError, match="a gradient penalty") as error:
            torch.autograd.grad(scores.sum(), x, create_graph=True)
    assert len(set(everyone(str(error.value)))) == 1
    both.accelerator.backward(scores.sum())  # the refused call leaves all usable
    both.close()


class Scored(nn.Module):
    """Returns scores, which of them are positive, a loss, and hidden states of the first block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, y):
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        scores, loss = self.head(x), F.cross_entropy(self.head(x), y)
        return {"loss": loss, "scores": scores, "positive": scores > 0, "hidden": hidden[0]}


def own_loss(output):
    """A loss of the script, which reads values before backward."""
    factor = 2.0 if output["positive"].sum().item() % 2 else 3.0
    return factor * output["scores"].square().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [1, 2])
def test_where_outputs_are_shared_every_stage_reads_them_and_makes_the_loss(steps):
    torch.manual_seed(0)
    batch = torch.randn(6, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 1])
    both = Twins(Scored().double(), batch, accumulation=steps)
    both.strategy.share_outputs()
    for _ in range(steps):
        with both.accelerator.accumulate(both.model):
            output, expected = both(*batch)
            for name in ("scores", "positive"):
                torch.testing.assert_close(output[name], expected[name])
            losses = own_loss(output), own_loss(expected)
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
            both.backward(*losses)
    both.check_gradients(**EXACT)
    output = both.model(*batch)
    with pytest.raises(UsageError, match="takes the output of an earlier block"):
        both.accelerator.backward(output["scores"].mean() + output["hidden"].mean())
    both.close()
