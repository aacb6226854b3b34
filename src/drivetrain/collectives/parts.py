"""Parts, the data of an operation on lists of tensors: each rank of an axis has a list."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from drivetrain.errors import UsageError

Parts: TypeAlias = Sequence[Sequence[Tensor]]
"""For each rank of the axis, in order: the rank's 1-D contiguous tensors, mostly slices of larger
tensors. Lengths and dtypes are the same on every rank."""

Layout: TypeAlias = tuple[tuple[tuple[int, torch.dtype], ...], ...]
"""For each rank of the axis, in order: elements and dtype of the rank's tensors."""


def checked_parts(parts: Parts, size: int) -> list[list[Tensor]]:
    """Return the tensors that each rank holds, outside of autograd.

    Raises:
        UsageError: there is not one list per rank, or a tensor is not 1-D and contiguous.
    """
    if len(parts) != size:
        raise UsageError(
            f"expected the tensors of each of {size} ranks, found {len(parts)} lists; the list of "
            "a rank that holds nothing is empty"
        )
    for rank, tensors in enumerate(parts):
        for tensor in tensors:
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise UsageError(
                    f"expected parts that are 1-D and contiguous, found shape "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()} among those of rank "
                    f"{rank}; pass tensor.view(-1) of a contiguous tensor"
                )
    return [[tensor.detach() for tensor in tensors] for tensors in parts]


def as_bytes(parts: Parts) -> list[list[Tensor]]:
    """Return views of the tensors' memory as uint8: all parts move as bytes."""
    return [[tensor.view(torch.uint8) for tensor in tensors] for tensors in parts]


def layout_of(parts: Parts) -> Layout:
    """Return elements and dtype of every tensor."""
    return tuple(tuple((tensor.numel(), tensor.dtype) for tensor in tensors) for tensors in parts)


def byte_lengths(layout: Layout) -> list[int]:
    """Return how many bytes each rank holds."""
    return [sum(numel * dtype.itemsize for numel, dtype in tensors) for tensors in layout]
