"""A bucket on the wire: whole, or in another dtype; ``powersgd`` has the one of low rank."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import Communicator, Route
from drivetrain.collectives.communicator import SumChannel
from drivetrain.parts.buckets import Bucket, BucketLayout

Finish: TypeAlias = Callable[[], object]
"""Returns when a bucket's flat tensor, tail included, holds the sum over ranks."""


def sum_in(dtype: torch.dtype, tensor: Tensor, communicator: Communicator, *, label: str) -> Finish:
    """Start to sum a tensor over the ranks in a dtype on the wire; the sum replaces its values."""
    if dtype == tensor.dtype:
        return communicator.all_reduce(tensor, label=label).wait
    rounded = tensor.to(dtype)
    handle = communicator.all_reduce(rounded, label=label)

    def finish() -> None:
        handle.wait()
        tensor.copy_(rounded)

    return finish


class CommunicationHook:
    """Turns a full bucket into its sum over the ranks; subclasses compress the message.

    Gradients are divided by N before. ``start`` is called for the same buckets in the same order on
    every rank, and so are the functions that ``start`` returns.
    """

    def __init__(self) -> None:
        self._channels: dict[BucketLayout, SumChannel] = {}

    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Finish:
        """Start to sum a bucket over the ranks, each gradient in its own dtype.

        Args:
            bucket: gradients / N and tail, complete; views without a gradient are zero.
            missing: indices in the bucket of parameters without a gradient on this rank.
            communicator: the data-parallel axis.
        """
        return self._channel(bucket, bucket.layout.dtype, communicator)(bucket.flat).wait

    def open(self, bucket: Bucket, communicator: Communicator) -> None:
        """Make the channel of a bucket: a checkpoint is about to be loaded into it."""
        self._channel(bucket, self._dtype(bucket.layout.dtype), communicator)

    def _dtype(self, given: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are sent."""
        return given

    def _channel(
        self, bucket: Bucket, dtype: torch.dtype, communicator: Communicator
    ) -> SumChannel:
        """Return the channel of a bucket's sums in some dtype."""
        layout = bucket.layout
        if layout not in self._channels:
            stretch = layout.stretch(bucket.names, dtype)
            self._channels[layout] = communicator.gradients_summed(stretch, "gradient bucket")
        return self._channels[layout]

    def sent(
        self, layout: BucketLayout, names: Sequence[str], route: Route
    ) -> Counter[tuple[str, str]]:
        """Return the bytes that a rank sends for a bucket per step, by (axis, operation).

        Args:
            layout: of the bucket.
            names: of all parameters in the sequence that was planned.
            route: the way of data over the data-parallel axis.
        """
        return route.gradients_summed(layout.stretch(names))

    def held(self, layout: BucketLayout, names: Sequence[str], route: Route) -> int:
        """Return the bytes that are held for a bucket's messages between steps."""
        return route.kept_back(layout.stretch(names))

    def forget(self) -> None:
        """Drop the state of every bucket: the buckets are about to change."""
        self._channels.clear()


class CastHook(CommunicationHook):
    """Sends gradients in another dtype: converts, sums and converts back.

    Args:
        on_wire: maps the dtype of gradients to the dtype in which they are sent.
    """

    def __init__(self, on_wire: Callable[[torch.dtype], torch.dtype]) -> None:
        super().__init__()
        self._on_wire = on_wire
        self._rounded: dict[BucketLayout, Tensor] = {}

    @override
    def _dtype(self, given: torch.dtype) -> torch.dtype:
        return self._on_wire(given)

    @override
    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Finish:
        rounded = self._rounded.get(bucket.layout)
        if rounded is None:
            rounded = torch.empty_like(bucket.flat, dtype=self._on_wire(bucket.layout.dtype))
            self._rounded[bucket.layout] = rounded
        rounded.copy_(bucket.flat)
        handle = self._channel(bucket, rounded.dtype, communicator)(rounded)

        def finish() -> None:
            handle.wait()
            bucket.flat.copy_(rounded)

        return finish

    @override
    def sent(
        self, layout: BucketLayout, names: Sequence[str], route: Route
    ) -> Counter[tuple[str, str]]:
        return route.gradients_summed(layout.stretch(names, self._on_wire(layout.dtype)))

    @override
    def held(self, layout: BucketLayout, names: Sequence[str], route: Route) -> int:
        dtype = self._on_wire(layout.dtype)
        return layout.numel * dtype.itemsize + route.kept_back(layout.stretch(names, dtype))

    @override
    def forget(self) -> None:
        super().forget()
        self._rounded.clear()


def narrowing(dtype: torch.dtype) -> Callable[[torch.dtype], torch.dtype]:
    """Return a rule for ``CastHook``: narrow wider gradients to this dtype, leave others."""

    def on_wire(given: torch.dtype) -> torch.dtype:
        return given if given.is_complex or given.itemsize <= dtype.itemsize else dtype

    return on_wire
