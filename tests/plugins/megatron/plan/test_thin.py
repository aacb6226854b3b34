"""Trials with thin matrices: the same plans as with whole ones, in little time and memory."""

import pytest
import torch
from torch import nn

from divided_words import planned
from drivetrain_megatron.plan import trial
from huggingface_models import ARCHITECTURES
from stacks import Residual, Stack


def thin_from_now_on(monkeypatch):
    """Let also small matrices be thin in trials."""
    monkeypatch.setattr(trial, "LARGE", 64)
    monkeypatch.setattr(trial, "FEATURES", 4)


@pytest.mark.parametrize(("name", "sharded"), [("gpt2", False), ("llama-gqa", True)])
def test_thin_trials_find_the_plans_of_whole_ones(monkeypatch, name, sharded):
    torch.manual_seed(0)
    model = ARCHITECTURES[name]()
    expected = planned(model, sequence_parallel=sharded)
    thin_from_now_on(monkeypatch)
    calls = []

    def counted(model, rows):
        calls.append(thin_layers(model, rows))
        return calls[-1]

    thin_layers = trial._thin_layers
    monkeypatch.setattr(trial, "_thin_layers", counted)
    found = planned(model, sequence_parallel=sharded)
    assert len(calls) == len({id(each) for each in found.blocks.values()})  # none was tried again
    assert all(calls)
    assert found.vocabulary == expected.vocabulary
    for block, derivation in expected.blocks.items():
        assert found.blocks[block].plan == derivation.plan
        assert found.blocks[block].refused.keys() == derivation.refused.keys()


class Halved(Residual):
    """Code that reads a weight of a layer itself: a thin matrix does not fit it."""

    def forward(self, x):
        return x + (self.up(x).relu() @ self.down.weight.t() / 2) + self.down.bias


def test_a_block_that_reads_its_weights_is_tried_as_it_is(monkeypatch):
    thin_from_now_on(monkeypatch)
    plan = planned(Stack([Halved(16), Halved(16)], first=nn.Linear(16, 16)))
    assert not any(derivation.untried for derivation in plan.blocks.values())


def test_tied_matrices_become_thin_together():
    ends = {"first": nn.Embedding(3000, 64), "last": nn.Linear(64, 3000)}
    model = Stack([nn.Linear(64, 2048), nn.Linear(2048, 64)], **ends, tied=True)
    thin = trial.random_copy(model, torch.Generator(), {"blocks.1"}, torch.float64)
    assert thin.last.weight is thin.first.weight
    assert thin.first.weight.shape == (3000, trial.FEATURES)
    up, down = thin.blocks
    assert down.weight.shape == (trial.FEATURES, 2048)
    assert down.bias.shape == (trial.FEATURES,)
    assert up.weight.shape == (2048, trial.FEATURES)
    ids = torch.arange(6).view(2, 3)
    assert thin(ids).shape == model(ids).shape
