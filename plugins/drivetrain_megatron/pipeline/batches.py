"""A call's batch cut into micro-batches along dims that are known, and tensors of these joined."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from drivetrain.errors import UsageError

Dims: TypeAlias = tuple[int | None, ...]
"""Of several tensors, the dim along which each is cut; None for one that is no part of a batch."""

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of one pass through the pipeline, and the targets for a loss function.

    The number is that of this forward of the model, counted over all calls, also for its dropouts.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int = 0
    targets: Any = None
    number: int = 0

    def flat(self) -> tuple[list[Any], TreeSpec]:
        """Return the leaves of args, kwargs and targets, and their tree."""
        return tree_flatten((self.args, dict(self.kwargs), self.targets))


@dataclass(frozen=True, slots=True)
class Division:
    """How the calls of one kind are cut.

    Attributes:
        dims: for each leaf of (args, kwargs, targets), the dim along which it is cut; None where
            the call must stay whole.
        joins: for each block, the dims along which its tensors are joined; empty for whole calls.
        kept: the blocks whose tensors the rest of the model reads, by index.
        failure: the first error that parts of the batch raised on this rank, in words, where the
            call stays whole; "" without any.
    """

    dims: Dims | None
    joins: tuple[Dims, ...]
    kept: frozenset[int]
    failure: str = ""

    def join_of(self, block: int, place: int) -> int | None:
        """Return the dim along which one tensor of a block is joined."""
        return self.joins[block][place] if self.joins else None


@dataclass(frozen=True, slots=True)
class DividedCall:
    """A call of the model of one kind, and its micro-batches.

    Attributes:
        kind: of the call.
        whole: its inputs and targets.
        parts: the micro-batches.
        division: how it was cut.
    """

    kind: Hashable
    whole: MicroBatch
    parts: Sequence[MicroBatch]
    division: Division


def first_rows(leaves: Sequence[Any]) -> int:
    """Return the extent of dim 0 of the first tensor.

    Raises:
        UsageError: there is no tensor with dims, or the first one is empty.
    """
    rows = next((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()), 0)
    if not rows:
        raise UsageError(
            f"expected a batch with rows to cut into micro-batches, found inputs of "
            f"{[tuple(x.shape) for x in leaves if isinstance(x, Tensor)]}; pass tensors that are "
            "not empty"
        )
    return rows


def rows_of(leaves: Sequence[Any], dims: Dims) -> int | None:
    """Return the rows of a batch whose leaves are cut along dims; None if they do not agree."""
    pairs = zip(leaves, dims, strict=True)
    found = {x.shape[dim] for x, dim in pairs if dim is not None}
    return found.pop() if len(found) == 1 else None


def cut_batch(whole: MicroBatch, count: int, dims: Dims | None = None) -> list[MicroBatch]:
    """Return at most ``count`` micro-batches, of as even a number of rows as can be.

    Args:
        whole: the inputs of a call, and the targets, which are cut as the inputs are.
        count: how many micro-batches are wanted.
        dims: for each leaf of the batch, the dim along which it is cut; other inputs go with each
            micro-batch. Without dims, dim 0 of tensors with the first one's rows.

    Raises:
        UsageError: there is no tensor with rows, or the batch is empty.
    """
    leaves, _ = whole.flat()
    first = first_rows(leaves)
    dims = dims or tuple(
        0 if isinstance(x, Tensor) and x.dim() and x.shape[0] == first else None for x in leaves
    )
    rows = rows_of(leaves, dims) or first
    pieces = min(count, rows)
    edges = [rows * index // pieces for index in range(pieces + 1)]
    return cut_at(whole, dims, edges)


def cut_at(whole: MicroBatch, dims: Dims, edges: Sequence[int]) -> list[MicroBatch]:
    """Return the micro-batches between given rows."""
    leaves, tree = whole.flat()
    found = []
    for start, stop in pairwise(edges):
        some = [
            x if dim is None else x.narrow(dim, start, stop - start)
            for x, dim in zip(leaves, dims, strict=True)
        ]
        given, named, wanted = tree_unflatten(some, tree)
        found.append(MicroBatch(given, named, stop - start, wanted))
    return found


def joined_dim(whole: Shape, parts: Sequence[Shape]) -> int | None:
    """Return the dim along which tensors are parts of a whole one; None if all are as large.

    Raises:
        ValueError: they are neither.
    """
    if all(part == whole for part in parts):
        return None
    for dim, extent in enumerate(whole):
        alike = all(
            len(part) == len(whole)
            and (*part[:dim], *part[dim + 1 :]) == (*whole[:dim], *whole[dim + 1 :])
            for part in parts
        )
        if alike and sum(part[dim] for part in parts) == extent:
            return dim
    raise ValueError(f"expected parts of a tensor of shape {whole}, found {list(parts)}")


def join(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    """Return the tensor of the whole batch; of tensors that are all alike, the first."""
    return parts[0] if dim is None or len(parts) == 1 else torch.cat(list(parts), dim)


def is_same(found: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal up to rounding in their dtype, by their norms."""
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    distance = torch.linalg.vector_norm((found - expected).double())
    limit = torch.linalg.vector_norm(expected.double()) * tolerance(expected.dtype)
    return bool(distance <= limit)  # no number is not equal


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error below which a difference is rounding: half of the digits."""
    return float(torch.finfo(dtype).eps ** 0.5)
