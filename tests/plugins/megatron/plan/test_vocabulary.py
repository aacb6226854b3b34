"""Layers outside of blocks that are divided by words, and layers that only look like them."""

import math

import pytest
import torch
from torch import nn

from divided_words import WIDE, WORDS, PostNorm, batch, trained
from drivetrain.errors import ConfigError
from stacks import Stack

FEATURES = 16


class Factorised(nn.Module):
    """A projection in front of the blocks, as wide as there are positions; a head behind them."""

    def __init__(self, positions):
        super().__init__()
        self.words, self.positions = (
            nn.Embedding(WORDS, FEATURES),
            nn.Embedding(positions, FEATURES),
        )
        self.wider = nn.Linear(FEATURES, WIDE)
        self.blocks = nn.ModuleList(PostNorm(WIDE) for _ in range(2))
        self.head = nn.Linear(WIDE, WORDS)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids):
        x = self.wider(self.words(ids) + self.positions(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


class ScaledEmbedding(nn.Embedding):
    """As of Gemma and BART."""

    def forward(self, ids):
        return super().forward(ids) * math.sqrt(self.embedding_dim)


def scaled():
    torch.manual_seed(0)
    return Stack(
        [PostNorm(WIDE), PostNorm(WIDE)],
        first=ScaledEmbedding(WORDS, WIDE),
        last=nn.Linear(WIDE, WORDS, bias=False),
        tied=True,
    ).double()


TP2 = {"name": "megatron", "tp": 2}


@pytest.mark.ranks(2)
def test_a_projection_in_front_of_blocks_is_no_head():
    """Its gradient was that of one rank's features, with the right loss."""
    for positions in (31, WIDE):
        torch.manual_seed(0)
        divided, mine, theirs = trained(Factorised(positions).double(), TP2, batch())
        assert "wider.weight" not in divided
        assert {"words.weight", "head.weight"} <= divided
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_an_embedding_of_another_class_stays_whole_or_is_refused():
    """The head that shares its weight, too; a user's plan is no guess: every rank says which."""
    divided, mine, theirs = trained(scaled(), TP2, batch())
    assert "first.weight" not in divided
    assert "blocks.0.up.weight" in divided
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    plan = {"first": "vocab", "last": "vocab", "*.up": "colwise", "*.down": "rowwise"}
    with pytest.raises(ConfigError, match="computes as nn.Embedding does"):
        trained(scaled(), {**TP2, "plan": plan}, batch())
