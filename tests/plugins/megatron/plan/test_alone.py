"""Layers that fit no group are divided by themselves, where a block would stay whole else."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from divided_words import WIDE, WORDS, TwoRanks, batch, trained
from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.plan import random_copy
from drivetrain_megatron.plan.model import TensorParallel
from drivetrain_megatron.plan.report import describe
from drivetrain_megatron.recording.calls import inputs_for


class Normed(nn.Module):
    """Norms over all features of queries and keys, as of OLMo 2; an uneven inner width."""

    def __init__(self, inner):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDE, WIDE) for _ in range(4))
        self.q_norm, self.k_norm, self.norm = (nn.LayerNorm(WIDE) for _ in range(3))
        self.up, self.inner_norm, self.down = (
            nn.Linear(WIDE, inner),
            nn.LayerNorm(inner),
            nn.Linear(inner, WIDE),
        )
        self.gate = nn.Linear(WIDE, 1)

    def forward(self, x):
        heads = (self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x))
        heads = (each.view(*x.shape[:2], -1, 8).transpose(1, 2) for each in heads)
        found = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = self.norm(x + self.o(found)) * self.gate(x).sigmoid()
        return x + self.down(F.gelu(self.inner_norm(self.up(x))))


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(inner=33):
    torch.manual_seed(0)
    return Model(lambda: Normed(inner)).double()


def planned(model, **options):
    model.example_inputs = batch()
    config = MegatronConfig(tp=2, **options)
    tensor = TensorParallel.of(config, model, TwoRanks())
    plan = tensor.plan(model, inputs_for(config, model))
    nbytes = {name: p.nbytes for name, p in model.named_parameters()}
    return plan.blocks["blocks.0"], "\n".join(describe(plan, tensor.facts(model, plan), nbytes, 2))


def alone_in(derivation):
    return {each.layer: each.by_rows for each in derivation.plan.alone}


def test_large_layers_are_divided_by_themselves():
    """A layer of 1 percent or less of a block stays whole: it would send more than it saves."""
    derivation, text = planned(built())
    assert not derivation.plan.groups
    assert alone_in(derivation) == {
        **dict.fromkeys(("q", "k", "v", "up"), False),
        **dict.fromkeys(("o", "down"), True),
    }
    assert "2 blocks blocks.0 to blocks.1: by itself q, k, v, o, up, down" in text
    assert "stays whole: " not in text


def test_thin_matrices_find_the_same(monkeypatch):
    expected, _ = planned(built())
    monkeypatch.setattr(random_copy, "LARGE", 64)
    monkeypatch.setattr(random_copy, "FEATURES", 4)
    found, _ = planned(built())
    assert found.plan == expected.plan


class Mixed(Normed):
    """Another pair of layers, which can be divided together."""

    def __init__(self):
        super().__init__(33)
        self.wide, self.narrow = nn.Linear(WIDE, 8 * WIDE), nn.Linear(8 * WIDE, WIDE)

    def forward(self, x):
        x = super().forward(x)
        return x + self.narrow(self.wide(x).relu())


def test_where_groups_are_the_larger_part_no_other_layer_is_divided():
    derivation, text = planned(Model(Mixed).double())
    assert [group.row for group in derivation.plan.groups] == ["narrow"]
    assert not derivation.plan.alone
    assert "o stays whole: " in text


def test_shards_of_the_sequence_and_plans_of_users_know_groups_alone():
    plan = {"*.wide": "colwise", "*.narrow": "rowwise"}
    derivation, _ = planned(Model(Mixed).double(), plan=plan)
    assert not derivation.plan.alone


@pytest.mark.ranks(2)
def test_they_train_as_in_one_process():
    divided, mine, theirs = trained(built(), {"name": "megatron", "tp": 2}, batch())
    names = {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in "qkvo"}
    assert names <= divided
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_the_cost_has_what_they_send():
    model = built()
    spec = ModelSpec.of(copy.deepcopy(model), states=0, inputs=((batch(),), {}))
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    strategy = accelerator.strategy_of(model)
    for _ in range(3):  # the first two forwards compare batches
        before = accelerator.traffic.sent()
        ids = batch()
        accelerator.backward(F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    after = accelerator.traffic.sent()
    grown = {key: count - before.get(key, 0) for key, count in after.items()}
    promised = dict(type(strategy).cost(strategy.config, spec, strategy.run).sent)
    assert promised["tp", "all_gather"]
    assert {key: count for key, count in grown.items() if count} == promised
    accelerator.free_memory()
