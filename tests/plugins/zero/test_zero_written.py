"""Writes of a forward that begin late: what ranks write differently is refused on all of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.errors import RankMismatchError


class Shortening(nn.Module):
    """A table whose forward shortens the rows of its batch, from the third call on."""

    def __init__(self):
        super().__init__()
        self.table, self.calls = nn.Embedding(8, 4), 0

    def forward(self, rows):
        self.calls += 1
        return F.embedding(rows, self.table.weight, max_norm=0.5 if self.calls > 2 else None)


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp"])
@pytest.mark.ranks(2)
def test_rows_that_each_rank_writes_by_itself_are_refused(name):
    accelerator = Accelerator(strategy=name, cpu=True)
    model = Shortening()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
    rows = torch.arange(8).chunk(2)[accelerator.process_index]
    for step in range(3):
        accelerator.backward(model(rows).square().mean())
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RankMismatchError, match="written different values"):
        optimizer.step()
    accelerator.free_memory()
