"""Awkward models: small, deterministic, and each one a way in which a strategy can go wrong.

A case builds the same model in every process and makes the same batch for a (step, rank) pair, so
one process can redo the training of many ranks. All compute is in fp64 unless the case is about
dtypes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, HIDDEN, OUT, VOCABULARY = 3, 7, 13, 5, 11


class Batch(NamedTuple):
    """The data of one rank in one micro-batch.

    Attributes:
        inputs: (ROWS, WIDTH) numbers, or (ROWS, WIDTH) tokens.
        targets: (ROWS, OUT) numbers, or (ROWS,) tokens.
        rank: the rank, for models that take another path on some ranks.
    """

    inputs: Tensor
    targets: Tensor
    rank: int


def numbers(step: int, rank: int) -> Batch:
    """Return a batch of numbers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return Batch(
        torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64),
        torch.randn(ROWS, OUT, generator=generator, dtype=torch.float64),
        rank,
    )


def tokens(step: int, rank: int) -> Batch:
    """Return a batch of tokens."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return Batch(
        torch.randint(VOCABULARY, (ROWS, WIDTH), generator=generator),
        torch.randint(VOCABULARY, (ROWS,), generator=generator),
        rank,
    )


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error of a model of numbers."""
    return F.mse_loss(model(batch.inputs).double(), batch.targets)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of a model of tokens."""
    return F.cross_entropy(model(batch.inputs), batch.targets)


def by_rank(model: nn.Module, batch: Batch) -> Tensor:
    """Return the squared error of a model whose path depends on the rank's data."""
    return F.mse_loss(model(batch.inputs, batch.rank), batch.targets)


def main_output(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss that reads only the first of two outputs."""
    outputs: dict[str, Any] = model(batch.inputs)
    return F.mse_loss(outputs["main"], batch.targets)


@dataclass(frozen=True, slots=True)
class Case:
    """An awkward model with its data and loss.

    Attributes:
        name: short, as in test ids.
        factory: makes the module; ``build`` calls it with a fixed seed.
        batch: the batch of a (step, rank).
        loss: the 0-d mean loss of a batch.
        large: whether it is too large to be trained for many steps.
    """

    name: str
    factory: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch] = numbers
    loss: Callable[[nn.Module, Batch], Tensor] = squared_error
    large: bool = False

    def build(self) -> nn.Module:
        """Return the model, with the same weights on every call."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(17)
            return self.factory()


def linear(inputs: int, outputs: int, *, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """Return a linear layer in fp64."""
    return nn.Linear(inputs, outputs, dtype=dtype)


def mlp() -> nn.Module:
    """Three plain layers of odd sizes."""
    return nn.Sequential(
        linear(WIDTH, HIDDEN), nn.Tanh(), linear(HIDDEN, HIDDEN), nn.Tanh(), linear(HIDDEN, OUT)
    )


class Tied(nn.Module):
    """Embedding and head are one parameter; the vocabulary divides by no world size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.body = linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens (rows, width) to logits (rows, vocabulary)."""
        logits: Tensor = self.head(torch.tanh(self.body(self.embedding(inputs).mean(1))))
        return logits


class Adapted(nn.Module):
    """Frozen layers with small trainable adapters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = linear(WIDTH, OUT).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(OUT, 2, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        frozen: Tensor = self.frozen(inputs)
        return frozen + inputs @ self.down.T @ self.up.T


class FirstFrozen(nn.Module):
    """The first layer is frozen: the input of the second requires no grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear(WIDTH, HIDDEN).requires_grad_(False)
        self.second = linear(HIDDEN, OUT)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        outputs: Tensor = self.second(torch.tanh(self.first(inputs)))
        return outputs


class Unused(nn.Module):
    """One layer is never called, on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.used = linear(WIDTH, OUT)
        self.unused = linear(HIDDEN, HIDDEN)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        outputs: Tensor = self.used(inputs)
        return outputs


class Branching(nn.Module):
    """Which layers are called, and in which order, depends on the rank's data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear(WIDTH, HIDDEN)
        self.even = linear(HIDDEN, HIDDEN)
        self.odd = linear(HIDDEN, HIDDEN)
        self.only_on_rank_zero = linear(HIDDEN, HIDDEN)
        self.last = linear(HIDDEN, OUT)

    def forward(self, inputs: Tensor, rank: int) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        hidden = torch.tanh(self.first(inputs))
        hidden = torch.tanh(self.odd(hidden) if rank % 2 else self.even(hidden))
        if rank == 0:
            hidden = torch.tanh(self.only_on_rank_zero(hidden))
        outputs: Tensor = self.last(hidden)
        return outputs


class OddShapes(nn.Module):
    """A 0-d parameter, an empty parameter, a single element, and sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, WIDTH, dtype=torch.float64))
        self.one = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
        self.layer = linear(WIDTH, OUT)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        outputs: Tensor = self.layer(inputs)
        return outputs * self.scale + self.one + (inputs @ self.empty.T).sum()


class Transposed(nn.Module):
    """Parameters whose storage is not in the order of their dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH, dtype=torch.float64).t())
        kernel = torch.randn(OUT, 2, HIDDEN, 1, dtype=torch.float64)
        self.kernel = nn.Parameter(kernel.to(memory_format=torch.channels_last))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        hidden = torch.tanh(inputs @ self.weight)  # (rows, hidden)
        image = torch.stack([hidden, -hidden.sin()], 1).unsqueeze(-1)  # (rows, 2, hidden, 1)
        return F.conv2d(image, self.kernel).flatten(1)


class MixedDtypes(nn.Module):
    """Layers in bf16, fp32 and fp64 side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = linear(WIDTH, HIDDEN, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float32)
        self.last = linear(HIDDEN, OUT)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        hidden = self.norm(self.coarse(inputs.bfloat16()).float())
        outputs: Tensor = self.last(torch.tanh(hidden).double())
        return outputs


class Normalized(nn.Module):
    """BatchNorm: buffers that change in forward, also an integer; and a buffer not saved."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        # No bias: its gradient would be zero but for rounding, which Adam makes as large as any.
        self.first = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(HIDDEN, dtype=torch.float64)
        self.last = linear(HIDDEN, OUT)
        self.register_buffer("factor", torch.tensor(0.5, dtype=torch.float64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        outputs: Tensor = self.last(torch.relu(self.norm(self.first(inputs))))
        return outputs * self.factor


class CalledTwice(nn.Module):
    """One layer runs twice in a forward and is registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear(WIDTH, HIDDEN)
        self.shared = linear(HIDDEN, HIDDEN)
        self.alias = self.shared
        self.last = linear(HIDDEN, OUT)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        hidden = torch.tanh(self.shared(torch.tanh(self.first(inputs))))
        outputs: Tensor = self.last(torch.tanh(self.alias(hidden)))
        return outputs


class TwoOutputs(nn.Module):
    """Returns a dict; the loss reads one of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = linear(WIDTH, HIDDEN)
        self.main = linear(HIDDEN, OUT)
        self.side = linear(HIDDEN, OUT)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Map (rows, width) to two of (rows, out)."""
        hidden = torch.tanh(self.body(inputs))
        return {"main": self.main(hidden), "side": self.side(hidden)}


class Recomputed(nn.Module):
    """A block whose activations are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear(WIDTH, HIDDEN)
        self.block = nn.Sequential(linear(HIDDEN, HIDDEN), nn.Tanh(), linear(HIDDEN, HIDDEN))
        self.last = linear(HIDDEN, OUT)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, out)."""
        hidden = checkpoint(self.block, self.first(inputs), use_reentrant=False)
        outputs: Tensor = self.last(torch.tanh(hidden))
        return outputs


def large() -> nn.Module:
    """One parameter of 27 MB: more than a usual bucket."""
    wide = linear(1009, 3331)
    return nn.Sequential(linear(WIDTH, 1009), nn.Tanh(), wide, nn.Tanh(), linear(3331, OUT))


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("mlp", mlp),
        Case("tied", Tied, tokens, cross_entropy),
        Case("adapted", Adapted),
        Case("first_frozen", FirstFrozen),
        Case("unused", Unused),
        Case("branching", Branching, loss=by_rank),
        Case("odd_shapes", OddShapes),
        Case("transposed", Transposed),
        Case("mixed_dtypes", MixedDtypes),
        Case("batchnorm", Normalized),
        Case("called_twice", CalledTwice),
        Case("two_outputs", TwoOutputs, loss=main_output),
        Case("recomputed", Recomputed),
        Case("large", large, large=True),
    )
}
"""All awkward models by name."""
