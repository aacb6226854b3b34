"""Towers of residual blocks in fp64: small, and repeated as the layers of large models are."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.testing.models import HIDDEN, OUT, VOCABULARY, WIDTH, linear


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.up, self.down = linear(width, hidden), linear(hidden, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Tower(nn.Module):
    """A layer, blocks, a layer: (rows, WIDTH) numbers to (rows, OUT).

    Args:
        blocks: how many there are.
        around: calls a block.
        dropout: the share of a block's results that it drops.

    Attributes:
        order: the blocks that run, in their order.
    """

    block = Block

    def __init__(self, blocks=3, *, around=None, dropout=0.0):
        super().__init__()
        self.first = linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(blocks))
        self.last = linear(WIDTH, OUT)
        self.around = around or (lambda block, x: block(x))
        self.order = tuple(range(blocks))
        for block in self.blocks:
            block.drop.p = dropout

    def forward(self, x):
        return self.last(self.body(self.first(x)))

    def body(self, x):
        for i in self.order:
            x = self.around(self.blocks[i], x)
        return x


class Gpt(nn.Module):
    """An embedding tied to the head, blocks between them: (rows, length) tokens to logits."""

    def __init__(self, blocks=3, *, norm=False, recompute=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block(HIDDEN, 2 * HIDDEN) for _ in range(blocks))
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64) if norm else nn.Identity()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, inputs):
        x = self.embedding(inputs).mean(1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))
