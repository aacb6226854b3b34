"""Layers that fit no group are divided by themselves, where a block would stay whole else."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cell_twins import Twins
from divided_words import WIDE, WORDS, batch, planned_and_described
from drivetrain.cost import ModelSpec
from drivetrain_megatron.plan import trial
from stacks import Stack


class Normed(nn.Module):
    """Norms over all features of queries and keys, as of OLMo 2; an uneven inner width."""

    def __init__(self, inner=33):
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


def model_of(make):
    return Stack(
        [make(), make()], first=nn.Embedding(WORDS, WIDE), last=nn.Linear(WIDE, WORDS)
    ).double()


def built():
    torch.manual_seed(0)
    return model_of(Normed)


def of_a_block(model, **options):
    model.example_inputs = batch()
    plan, text = planned_and_described(model, **options)
    return plan.blocks["blocks.0"].plan, text


def test_large_layers_are_divided_by_themselves(monkeypatch):
    """A layer of 1 percent or less of a block stays whole: it would send more than it saves.

    Thin matrices find the same.
    """
    expected, text = of_a_block(built())
    assert not expected.groups
    assert {each.layer: each.by_rows for each in expected.alone} == {
        **dict.fromkeys(("q", "k", "v", "up"), False),
        **dict.fromkeys(("o", "down"), True),
    }
    assert "2 blocks blocks.0 to blocks.1: by itself q, k, v, o, up, down" in text
    assert "stays whole: " not in text
    monkeypatch.setattr(trial, "LARGE", 64)
    monkeypatch.setattr(trial, "FEATURES", 4)
    assert of_a_block(built())[0] == expected


class Mixed(Normed):
    """Another pair of layers, which can be divided together."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDE, 8 * WIDE), nn.Linear(8 * WIDE, WIDE)

    def forward(self, x):
        x = super().forward(x)
        return x + self.narrow(self.wide(x).relu())


def test_beside_groups_and_in_plans_of_users_no_layer_is_divided_by_itself():
    plan, text = of_a_block(model_of(Mixed))
    assert [group.row for group in plan.groups] == ["narrow"]
    assert not plan.alone
    assert "o stays whole: " in text
    plan, _ = of_a_block(model_of(Mixed), plan={"*.wide": "colwise", "*.narrow": "rowwise"})
    assert not plan.alone


@pytest.mark.ranks(2)
def test_they_train_as_in_one_process_and_the_cost_has_what_they_send():
    model = built()
    spec = ModelSpec.of(copy.deepcopy(model), states=0, inputs=((batch(),), {}))
    both = Twins(model, tp=2)
    assert both.divided >= {f"blocks.{n}.{layer}.weight" for n in range(2) for layer in "qkvo"}
    both.train(batch(), batch())  # the first two forwards compare batches
    both.accelerator.traffic.clear()
    both.backward(batch())
    both.step()
    sent = both.accelerator.traffic.sent()
    strategy = both.accelerator.strategy_of(both.model)
    promised = dict(type(strategy).cost(strategy.config, spec, strategy.run).sent)
    assert promised["tp", "all_gather"]
    assert {key: count for key, count in sent.items() if count} == promised
    both.close()
