"""Parameters that a forward writes by its own batch: refused, on every rank with the same words."""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import RankMismatchError, UsageError


@pytest.mark.ranks(2)
def test_layers_that_shorten_the_rows_of_their_batch_are_refused():
    """Under every strategy; not where the ranks of a replica have the same batch."""
    for make in (nn.Embedding, nn.EmbeddingBag):
        model = nn.Sequential(nn.Linear(2, 2), make(6, 4, max_norm=1.0))
        for strategy in ("ddp", "zero2", "zero3", "fsdp"):
            accelerator = Accelerator(strategy=strategy, cpu=True)
            with pytest.raises(UsageError, match=r"found '1', .*max_norm=1.0.*torch.renorm"):
                accelerator.prepare(model)
            accelerator.free_memory()
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Linear(4, 2))
    model.example_inputs = {"input": torch.arange(3)}
    accelerator.prepare(model)
    accelerator.free_memory()


class Centered(nn.Linear):
    """Takes its bias from the first batch, as ActNorm does."""

    def __init__(self, own):
        super().__init__(4, 2)
        self.own, self.fresh = own, True

    def forward(self, x):
        if self.fresh:
            self.fresh = False
            self.bias.data.copy_(-x.mean() if self.own else torch.ones(()))
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.ranks(2)
def test_values_of_a_first_batch_are_refused_where_ranks_have_different_ones(strategy):
    for own in (True, False):
        accelerator = Accelerator(strategy=strategy, cpu=True)
        model = Centered(own)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.full((3, 4), float(accelerator.process_index))).sum()
        if own:
            with pytest.raises(RankMismatchError, match=r"'bias' on ranks 0 and 1.*its batch"):
                accelerator.backward(loss)
        else:
            accelerator.backward(loss)
            optimizer.step()
        accelerator.free_memory()
