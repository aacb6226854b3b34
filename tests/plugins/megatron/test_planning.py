"""Ranks whose plans differ: an error on each of them, or one plan for all."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases import case
from drivetrain import Accelerator
from drivetrain.errors import RankMismatchError
from drivetrain.parts.naming import named_parameters
from drivetrain.testing.conformance.twins import everyone
from drivetrain_megatron.pipeline import cut
from stacks import Residual

WIDTH = 8


class Failing(Residual):
    """Fails on rank 1, wherever it is tried: in evaluation mode, or in any."""

    def __init__(self, modes):
        super().__init__(WIDTH)
        self.modes = modes

    def forward(self, x):
        if dist.get_rank() == 1 and self.training in self.modes:
            raise RuntimeError("no memory left")
        return super().forward(x)


def chain(make):
    model = nn.Sequential(*(make() for _ in range(4)))
    model.example_inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.ranks(2)
def test_a_plan_that_one_rank_lacks_is_an_error_on_all():
    for cell, modes in itertools.product(({"tp": 2}, {"pp": 2}), ((False,), (False, True))):
        model = chain(lambda modes=modes: Failing(modes))
        accelerator = Accelerator(strategy={"name": "megatron", **cell}, cpu=True)
        with case(cell, modes):
            if cell == {"pp": 2} and modes == (False,):
                # Stages are found by a look at training, without any trial.
                accelerator.prepare(model)
            else:
                match = r"rank 0 has .*rank 1 .*no memory left"
                with pytest.raises(RankMismatchError, match=match):
                    accelerator.prepare(model)
        everyone(None)
        accelerator.free_memory()


@pytest.mark.ranks(4)
def test_replicas_cut_alike_where_ranks_measure_other_times(monkeypatch):
    rank = dist.get_rank()
    seconds = [5.0 if block == rank else 1.0 for block in range(4)]
    monkeypatch.setattr(cut, "profile", lambda model, look: seconds)
    torch.manual_seed(0)
    model = chain(lambda: Residual(WIDTH)).double()
    model.example_inputs = model.example_inputs.double()
    whole = dict(model.named_parameters())
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "micro_batches": 2, "cut": "profile"}, cpu=True
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    names = everyone(list(named_parameters(model)))
    held = [{name.split(".")[0] for name in mine} for mine in names]
    stages = [set("0"), set("123")]  # as rank 0 has measured
    assert sorted(held, key=len) == sorted(stages * 2, key=len)
    assert accelerator.get_state_dict(model).keys() == whole.keys()
    everyone(None)
    accelerator.free_memory()
