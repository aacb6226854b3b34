"""Entrance and exit of a divided part of a model (Korthikanti et al. 2022, section 4.2.2).

Outside of a part whose layers are cut over ranks (arXiv 2205.05198), an activation is either whole
on every rank, or a shard of the sequence (sequence parallelism); inside, every rank has its
features or heads of the whole sequence.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain_megatron.tensor.operators import copy, gather, reduce, reduce_scatter
from drivetrain_megatron.tensor.partition import Partition, even


class TokenShards:
    """Along which dim activations are cut into shards, and how long the dim is right now.

    Whoever cuts the first activation of a forward says how long it is; shards may be uneven, so
    that one rank's shard does not tell. One object serves a whole region of the model.

    Args:
        dim: of activations, counted from the end; any dim of tokens will do.
    """

    def __init__(self, dim: int = -2) -> None:
        self.dim = dim
        self._size: int | None = None

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Say how long the dim is, inside of the context."""
        before, self._size = self._size, size
        try:
            yield
        finally:
            self._size = before

    def begin(self, size: int) -> None:
        """Say how long the dim is from now on."""
        self._size = size

    def partition(self, ranks: int) -> Partition:
        """Return how the dim is cut.

        Raises:
            UsageError: nobody said how long it is.
        """
        if self._size is None:
            raise UsageError(
                f"expected to know how long dim {self.dim} of activations is, found a layer that "
                "runs outside of the part of the model that is sequence parallel; call the model "
                "itself, not one of its layers"
            )
        return even(self.dim, self._size, ranks)


@dataclass(frozen=True)
class Edges:
    """The way into, and out of, a part of the model whose layers are cut over ranks.

    Attributes:
        ranks: the axis.
        tokens: None: activations outside are whole; else they are shards of the sequence.
        prepared: whether what comes in has entered already, for several layers together.
    """

    ranks: Communicator
    tokens: TokenShards | None = None
    prepared: bool = False

    @property
    def sequence(self) -> Partition | None:
        """How activations outside are cut; None when they are whole."""
        if self.tokens is None or self.ranks.size == 1:
            return None
        return self.tokens.partition(self.ranks.size)

    def enter(self, x: Tensor) -> Tensor:
        """Return the whole input of every rank's part; its gradients are summed over ranks."""
        if self.prepared:
            return x
        sequence = self.sequence
        if sequence is None:
            return copy(x, self.ranks)
        return gather(x, self.ranks, sequence, partial=True)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of their parts, as it is outside."""
        sequence = self.sequence
        if sequence is None:
            return reduce(x, self.ranks)
        return reduce_scatter(x, self.ranks, sequence)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Edges":
        return self  # communicators have threads and groups
