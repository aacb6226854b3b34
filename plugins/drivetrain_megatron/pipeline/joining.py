"""Tensors of micro-batches, joined to those of the whole batch."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Dims: TypeAlias = tuple[int | None, ...]
"""Of several tensors, the dim along which each is cut; None for one that is no part of a batch."""

Shape: TypeAlias = tuple[int, ...]


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
