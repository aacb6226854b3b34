"""Operations on parts by way of those on one flat tensor: parts are copied side by side, and back.

For communicators that cannot send from several places at once::

    gather_parts   copy mine into a flat of bytes; all-gather;        on wait: copy the others out
    reduce_parts   per dtype: copy all into a flat; reduce-scatter;   on wait: copy mine out
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drivetrain.collectives.parts import as_bytes

if TYPE_CHECKING:
    from drivetrain.collectives.communicator import Communicator, Handle


class StagedHandle:
    """Operations on flat tensors, and the copies out of them.

    Args:
        operations: those under way.
        copies: what is filled after them, and the slices of a flat tensor to fill it from; keeps
            the flat tensors alive.
    """

    def __init__(
        self, operations: Sequence["Handle"], copies: Sequence[tuple[list[Tensor], list[Tensor]]]
    ) -> None:
        self._operations = operations
        self._copies = copies

    def wait(self) -> None:
        """Return when the parts hold the result; on an accelerator the current stream waits.

        Raises:
            CollectiveError: an operation failed or timed out.
        """
        for operation in self._operations:
            operation.wait()
        with torch.no_grad():
            for tensors, slices in self._copies:
                _copy(tensors, slices)
        for _, slices in self._copies:
            if slices and slices[0].device.type != "cpu":
                # Its memory is of the stream of submission, which the current one may not be.
                slices[0].record_stream(torch.accelerator.current_stream(slices[0].device))
        self._copies = ()

    def done(self) -> bool:
        """Whether all operations have finished."""
        return all(operation.done() for operation in self._operations)


class Staging:
    """A flat tensor with room for parts of one dtype, side by side in the order of ranks.

    Args:
        parts: for each rank, its tensors; at least one tensor in all.

    Attributes:
        flat: the tensor, not filled.
        chunks: the (start, stop) of what each rank holds.
        slices: for each rank, the views of the flat tensor that stand for its tensors.
    """

    def __init__(self, parts: list[list[Tensor]]) -> None:
        lengths = [tensor.numel() for tensors in parts for tensor in tensors]
        first = next(tensor for tensors in parts for tensor in tensors)
        self.flat = first.new_empty(sum(lengths))
        views = iter(torch.split(self.flat, lengths))
        self.slices = [list(itertools.islice(views, len(tensors))) for tensors in parts]
        ends = itertools.accumulate(sum(map(Tensor.numel, tensors)) for tensors in parts)
        self.chunks = list(itertools.pairwise([0, *ends]))


def gather_staged(communicator: "Communicator", parts: list[list[Tensor]], label: str) -> "Handle":
    """Fill the other ranks' tensors by one all-gather of bytes."""
    if not any(parts):
        return StagedHandle([], [])
    parts = as_bytes(parts)
    staging = Staging(parts)
    with torch.no_grad():
        _copy(staging.slices[communicator.rank], parts[communicator.rank])
    others = [rank for rank in range(communicator.size) if rank != communicator.rank]
    return StagedHandle(
        [communicator.all_gather(staging.flat, chunks=staging.chunks, label=label)],
        [(parts[rank], staging.slices[rank]) for rank in others],
    )


def reduce_staged(
    communicator: "Communicator", parts: list[list[Tensor]], scale: float, label: str
) -> "Handle":
    """Sum into this rank's tensors by one reduce-scatter per dtype."""
    operations, copies = [], []
    for dtype in dict.fromkeys(tensor.dtype for tensors in parts for tensor in tensors):
        kind = [[tensor for tensor in tensors if tensor.dtype == dtype] for tensors in parts]
        staging = Staging(kind)
        with torch.no_grad():
            for tensors, slices in zip(kind, staging.slices, strict=True):
                _copy(slices, tensors)
        operations.append(
            communicator.reduce_scatter(
                staging.flat, scale=scale, chunks=staging.chunks, label=label
            )
        )
        copies.append((kind[communicator.rank], staging.slices[communicator.rank]))
    return StagedHandle(operations, copies)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors at once; there may be none."""
    if targets:
        torch._foreach_copy_(targets, sources)
