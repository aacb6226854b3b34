"""Handles of operations under way: finished, put off until a wait, or with copies that follow.

A communicator that cannot send from several places at once copies parts side by side, and back::

    gather_parts   copy mine into a flat of bytes; all-gather;        on wait: copy the others out
    reduce_parts   per dtype: copy all into a flat; reduce-scatter;   on wait: copy mine out
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the tensor holds the result; may be called more than once.

        On an accelerator only the current stream waits.

        Raises:
            CollectiveError: the operation failed or timed out.
        """

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""


class Finished:
    """A handle of an operation that is over."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


class Deferred:
    """A handle whose ``wait`` does the work.

    Args:
        work: called once.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def wait(self) -> None:
        """Do the work, unless it is done."""
        if self._work is not None:
            self._work()
            self._work = None

    def done(self) -> bool:
        """Whether the work is done."""
        return self._work is None


class StagedHandle:
    """Operations on flat tensors, and the copies out of them.

    Args:
        operations: those under way.
        copies: what is filled after them, and the slices of a flat tensor to fill it from; keeps
            the flat tensors alive.
    """

    def __init__(
        self, operations: Sequence[Handle], copies: Sequence[tuple[list[Tensor], list[Tensor]]]
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
                copy_all(tensors, slices)
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


def copy_all(targets: Tensors, sources: Tensors) -> None:
    """Copy many tensors at once; there may be none."""
    if targets:
        torch._foreach_copy_(targets, sources)
