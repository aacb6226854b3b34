"""The outline of most models: blocks one after the other, with a layer before and one behind."""

from torch import nn


class Residual(nn.Module):
    """Two linear layers beside the identity.

    Args:
        width: of the input and of the output.
        inner: of what lies between the layers; twice the width if left out.
        act: what is done there.
        norm: makes a norm of a width in front of the layers.
    """

    def __init__(self, width, inner=None, *, act=nn.Tanh, norm=None):
        super().__init__()
        inner = inner or 2 * width
        self.norm = nn.Identity() if norm is None else norm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.act = act()

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """A layer, blocks and a layer, one after the other; further arguments go to each block.

    Args:
        blocks: in their order.
        first: stands before them, if given.
        last: stands behind them, if given.
        tied: ``last`` has the weight of ``first``.
    """

    def __init__(self, blocks, *, first=None, last=None, tied=False):
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        if tied:
            last.weight = first.weight

    def forward(self, x, *args, **kwargs):
        x = x if self.first is None else self.first(x)
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x if self.last is None else self.last(x)


class Lossy(Stack):
    """A stack that makes its loss itself: the mean of its squared outputs."""

    def forward(self, x, *args, **kwargs):
        return {"loss": super().forward(x, *args, **kwargs).square().mean()}
