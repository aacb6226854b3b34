"""Writes into parameters: masters follow, and ranks that write differently hear of it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.errors import RankMismatchError
from stacks import Parts
from zero_stages import MASTERS, each, start

pytestmark = pytest.mark.ranks(2)


def shortening(m, rows):
    """Shorten the rows of a batch, from the third call on, more each time."""
    m.calls += 1
    return F.embedding(rows, m.table.weight, max_norm=1.0 / m.calls if m.calls > 2 else None)


@pytest.mark.parametrize(("name", "alike"), [("zero2", 0), ("zero3", 1), ("fsdp", 0)])
def test_rows_that_each_rank_writes_by_itself_are_refused(name, alike):
    """The first time, or after a time at which ranks wrote alike."""
    accelerator = Accelerator(strategy=name, cpu=True)
    model = Parts(shortening, table=nn.Embedding(8, 4), calls=0)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
    rows = torch.arange(8).chunk(2)[accelerator.process_index]
    for step in range(3 + alike):
        last = step == 2 + alike
        accelerator.backward(model(rows if last else torch.arange(8)).square().mean())
        if not last:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RankMismatchError, match="written different values"):
        optimizer.step()


@each("zero1", "zero2")
def test_masters_follow_what_a_script_writes_before_a_step(strategy):
    """A step of rate 0 leaves weights in bf16 as they were written; masters would undo it."""

    def set_data(parameter):
        parameter.data = torch.full_like(parameter, 0.25)

    for write in (lambda parameter: parameter.fill_(0.25), set_data):
        accelerator = start(strategy, **MASTERS)
        linear = nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(linear, SGD(linear.parameters(), lr=0.0))
        accelerator.backward(model(torch.ones(2, 4)).float().sum())
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)
        optimizer.step()
        assert all(each.eq(0.25).all() for each in accelerator.get_state_dict(model).values())
