"""Layers outside of blocks that are divided by words, and layers that only look like them."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.errors import ConfigError

WORDS, FEATURES, WIDE = 61, 16, 32


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        heads = (each(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for each in (self.q, self.k))
        values = self.v(x).view(*x.shape[:2], -1, 8).transpose(1, 2)
        found = F.scaled_dot_product_attention(*heads, values)
        return self.o(found.transpose(1, 2).flatten(2))


class PostNorm(nn.Module):
    """As in BERT: the input goes into attention as it is."""

    def __init__(self, width):
        super().__init__()
        self.attention = Attention(width)
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = self.norm(x + self.attention(x))
        return self.last(x + self.down(F.gelu(self.up(x))))


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


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = ScaledEmbedding(WORDS, WIDE)
        self.blocks = nn.ModuleList(PostNorm(WIDE) for _ in range(2))
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def trained(model, strategy, ids):
    """Return the whole weights after a step of plain SGD, and those of one process."""
    twin = copy.deepcopy(model)
    loss_of(twin, ids).backward()
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    facts = accelerator.strategy_of(model)._facts
    divided = {name for name, known in facts.items() if known.partition is not None}
    accelerator.backward(loss_of(model, ids))
    optimizer.step()
    state = accelerator.get_state_dict(model)
    expected = {name: p.detach() - p.grad for name, p in twin.named_parameters()}
    accelerator.free_memory()
    return divided, {name: state[name] for name in expected}, expected


def batch():
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.ranks(2)
def test_a_projection_in_front_of_blocks_is_no_head():
    """Its gradient was that of one rank's features, with the right loss."""
    for positions in (31, WIDE):
        torch.manual_seed(0)
        model = Factorised(positions).double()
        divided, mine, theirs = trained(model, {"name": "megatron", "tp": 2}, batch())
        assert "wider.weight" not in divided
        assert {"words.weight", "head.weight"} <= divided
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_an_embedding_of_another_class_stays_whole():
    """The head that shares its weight, too; the blocks are divided."""
    torch.manual_seed(0)
    model = Scaled().double()
    divided, mine, theirs = trained(model, {"name": "megatron", "tp": 2}, batch())
    assert "words.weight" not in divided
    assert "blocks.0.up.weight" in divided
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_an_embedding_that_a_plan_names_is_divided_or_refused():
    """A user's plan is no guess: every rank says which layer cannot be divided."""
    plan = {"words": "vocab", "head": "vocab", "*.up": "colwise", "*.down": "rowwise"}
    with pytest.raises(ConfigError, match="computes as nn.Embedding does"):
        trained(Scaled().double(), {"name": "megatron", "tp": 2, "plan": plan}, batch())
