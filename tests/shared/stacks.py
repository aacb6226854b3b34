"""The outlines of most models: blocks one after the other between two layers, and named parts."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.model.modules import uncompiled
from drivetrain.model.trace import trace_model
from drivetrain.testing.models import HIDDEN, OUT, VOCABULARY, WIDTH, linear
from drivetrain_megatron.recording.phases import recording_of
from drivetrain_megatron.recording.proxy import StageProxy


class Residual(nn.Module):
    """Two linear layers beside the identity.

    Args:
        width: of the input and of the output.
        inner: of what lies between the layers; twice the width if left out.
        act: what is done there.
        norm: makes a norm of a width in front of the layers.
        drop: the share of the results that is dropped, if any may be.
        dtype: of the layers.
    """

    def __init__(self, width, inner=None, *, act=nn.Tanh, norm=None, drop=None, dtype=None):
        super().__init__()
        inner = inner or 2 * width
        self.norm = nn.Identity() if norm is None else norm(width)
        self.up = nn.Linear(width, inner, dtype=dtype)
        self.down = nn.Linear(inner, width, dtype=dtype)
        self.act = act()
        self.drop = nn.Identity() if drop is None else nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Block(Residual):
    """One that models of the conformance suite could have: in fp64, with a dropout."""

    def __init__(self, width=WIDTH, hidden=HIDDEN):
        super().__init__(width, hidden, drop=0.0, dtype=torch.float64)


class Parts(nn.Module):
    """Modules, parameters and other attributes by name, and what is computed of them and inputs."""

    def __init__(self, compute=None, **parts):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.compute(self, *args, **kwargs)


class LowRank(nn.Module):
    """A linear layer with a small pair of layers beside it."""

    def __init__(self, base, rank=3):
        super().__init__()
        self.base = base
        outputs, inputs = base.weight.shape
        self.down = nn.Linear(inputs, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, outputs, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Stack(nn.Module):
    """A layer, blocks and a layer, one after the other; further arguments go to each block.

    Args:
        blocks: in their order.
        first: stands before them, if given.
        last: stands behind them, if given.
        tied: ``last`` has the weight of ``first``.

    Attributes:
        order: the numbers of the blocks that run, in their order; all where None.
    """

    order = None

    def __init__(self, blocks, *, first=None, last=None, tied=False):
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        if tied:
            last.weight = first.weight

    def forward(self, x, *args, **kwargs):
        x = self.body(x if self.first is None else self.first(x), *args, **kwargs)
        return x if self.last is None else self.last(x)

    def body(self, x, *args, **kwargs):
        for block in self.blocks if self.order is None else [self.blocks[i] for i in self.order]:
            x = block(x, *args, **kwargs)
        return x


def words(vocabulary, width, inner=None, *, blocks=2, bias=True, **options):
    """Return residual blocks between an embedding and a head."""
    first, last = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=bias)
    layers = [Residual(width, inner, **options) for _ in range(blocks)]
    return Stack(layers, first=first, last=last)


class Lossy(Stack):
    """A stack that makes its loss itself: the mean of its squared outputs."""

    def forward(self, x, *args, **kwargs):
        return {"loss": super().forward(x, *args, **kwargs).square().mean()}


class Oddities(Stack):
    """Tied, frozen, empty, 0-d and one-row parameters: (rows,) words to (rows, words) logits."""

    def __init__(self, vocabulary, width):
        first, last = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        blocks = (nn.Linear(width, width) for _ in range(2))
        super().__init__(blocks, first=first, last=last, tied=True)
        self.fixed = nn.Linear(width, width).requires_grad_(False)
        self.one = nn.Parameter(torch.randn(1, width))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, width))

    def body(self, x):
        x = x * self.scale + self.one
        for block in self.blocks:
            x = x + torch.tanh(block(self.fixed(x)))
        return x + (x @ self.empty.t()).sum()


class Tower(Stack):
    """Blocks between two layers, all in fp64: (rows, WIDTH) numbers to (rows, OUT).

    Args:
        blocks: how many there are.
        around: calls a block.
        dropout: the share of a block's results that it drops.
    """

    block = Block

    def __init__(self, blocks=3, *, around=None, dropout=0.0):
        first, last = linear(WIDTH, WIDTH), linear(WIDTH, OUT)
        super().__init__((self.block() for _ in range(blocks)), first=first, last=last)
        self.order = tuple(range(blocks))
        self.around = around or (lambda block, x: block(x))
        for block in self.blocks:
            block.drop.p = dropout

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


class Doubled(torch.autograd.Function):
    """A function of a script's own, with its own backward."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def record(model, args, kwargs):
    """Look once at a model, also on the meta device, and divide the trace into phases."""
    trace = trace_model(uncompiled(model), args, kwargs, kind=StageProxy, isolated=True)
    return recording_of(model, trace)
