"""A bucket on the wire: whole, in another dtype, of low rank; and how the options choose.

``hook: powersgd`` sums a bucket as the method ``powersgd`` of slow links does (Vogels, Karimireddy,
Jaggi, "PowerSGD", NeurIPS 2019), between all ranks. Vectors, matrices that factors would not make
smaller and the tail are sent whole. Gradients come divided by N already, so sums are means, and a
rank keeps its error in units of 1/N.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import Communicator, Handle, Route, chunk_bounds
from drivetrain.collectives.communicator import SumChannel
from drivetrain.collectives.volume import FlatSlice, SlicesByRank
from drivetrain.compression.compressor import (
    Compressor,
    Followed,
    OnWire,
    Rounded,
    as_it_is,
    is_finite,
)
from drivetrain.compression.error_feedback import LinkChannel
from drivetrain.parallel.replicated import Bucket, BucketLayout
from drivetrain.registry import compressors
from drivetrain.runtime.precision import Precision
from drivetrain_ddp.options import DdpConfig

# --- a bucket on the wire ---

Finish: TypeAlias = Callable[[], object]
"""Returns when a bucket's flat tensor, tail included, holds the sum over ranks."""


class CommunicationHook:
    """Turns a full bucket into its sum over the ranks; subclasses compress the message.

    Gradients are divided by N before. ``start`` is called for the same buckets in the same order on
    every rank, and so are the functions that ``start`` returns.

    Args:
        on_wire: maps the dtype of gradients to the dtype in which they are sent and summed.
    """

    def __init__(self, on_wire: OnWire = as_it_is) -> None:
        self._on_wire = on_wire
        self._channels: dict[BucketLayout, SumChannel] = {}

    def start(self, bucket: Bucket, communicator: Communicator) -> Finish:
        """Start to sum a bucket over the ranks.

        Args:
            bucket: gradients / N and tail, complete; views without a gradient are zero.
            communicator: the data-parallel axis.
        """
        self.open(bucket, communicator)
        return self._channels[bucket.layout](bucket.flat).wait

    def open(self, bucket: Bucket, communicator: Communicator) -> None:
        """Make the channel of a bucket, unless it is there: a checkpoint may be about to come."""
        if bucket.layout not in self._channels:
            self._channels[bucket.layout] = self._channel(bucket, communicator)

    def _channel(self, bucket: Bucket, communicator: Communicator) -> SumChannel:
        """Return the sums of a bucket."""
        crossing = Rounded([bucket.flat], self._on_wire)
        flat_slice = self._flat_slice(bucket.layout, bucket.names)
        channel = communicator.gradients_summed(flat_slice, "gradient bucket")

        def start(_: Tensor) -> Handle:
            crossing.leave()
            return Followed(channel(*crossing.sent), crossing.arrive)

        return start

    def _flat_slice(self, layout: BucketLayout, names: Sequence[str]) -> FlatSlice:
        """Describe a bucket as it crosses."""
        return layout.flat_slice(names, self._on_wire(layout.dtype))

    def sent(
        self, layout: BucketLayout, names: Sequence[str], route: Route
    ) -> Counter[tuple[str, str]]:
        """Return the bytes that a rank sends for a bucket per step, by (axis, operation).

        Args:
            layout: of the bucket.
            names: of all parameters in the sequence that was planned.
            route: the way of data over the data-parallel axis.
        """
        return route.gradients_summed(self._flat_slice(layout, names))

    def held(self, layout: BucketLayout, names: Sequence[str], route: Route) -> int:
        """Return the bytes that are held for a bucket's messages between steps."""
        flat_slice = self._flat_slice(layout, names)
        rounded = 0 if flat_slice.dtype == layout.dtype else flat_slice.nbytes
        return rounded + route.kept_back(flat_slice)

    def forget(self) -> None:
        """Drop the state of every bucket: the buckets are about to change."""
        self._channels.clear()


# --- powerSGD ---


class PowerSgdHook(CommunicationHook):
    """Sums buckets of fp32 and fp64 as matrices of low rank.

    Args:
        rank: columns of the factors.
        start_step: how many sums of each bucket are plain before compression starts; again so
            after a change of the buckets.
        on_wire: maps the dtype of gradients to the dtype in which all is sent.
    """

    def __init__(self, rank: int, start_step: int, on_wire: OnWire) -> None:
        super().__init__(on_wire)
        kind = compressors().load("powersgd")
        self._method: Compressor[Any] = kind(
            kind.Config(rank=rank), between_ranks=True, on_wire=on_wire
        )
        self._start_step = start_step

    @override
    def _channel(self, bucket: Bucket, communicator: Communicator) -> SumChannel:
        exact, size = partial(super()._channel, bucket, communicator), communicator.size
        pieces = self._pieces(bucket.layout, bucket.names, size)
        if not self._method.approximates(pieces):
            return exact()
        reduction = self._method.reduction(communicator, pieces, everywhere=True)
        lengths = [part[0].numel for part in pieces]
        spans = bucket.layout.flat_slice(bucket.names).spans

        def give_back() -> None:
            # Where no rank had a gradient no parameter is updated: what came are errors alone.
            flags = bucket.flags.tolist()
            unused = {span.name: span for span, flag in zip(spans, flags, strict=True) if not flag}
            for kept in reduction.feedback():
                if span := unused.get(kept.span.name):
                    values = bucket.flat[span.start : span.stop]
                    if is_finite(values):
                        kept.errors.add_(values, alpha=1 / size)

        def approximate(flat: Tensor) -> Handle:
            parts = [[each] for each in flat.split_with_sizes(lengths)]  # its memory may be renewed
            summed = reduction.start(parts, first=lambda: None, label="powersgd")
            return Followed(summed, give_back)

        def first(flat: Tensor) -> Handle:
            return exact()(flat)  # for one sum: no rounded bucket is held when compression starts

        channel = LinkChannel(first, self._start_step)
        channel.take_method(reduction, spans, approximate)
        return channel

    @override
    def sent(
        self, layout: BucketLayout, names: Sequence[str], route: Route
    ) -> Counter[tuple[str, str]]:
        pieces = self._pieces(layout, names, route.axis.size)
        if not self._method.approximates(pieces):
            return super().sent(layout, names, route)
        return self._method.sent(route, pieces, everywhere=True)

    @override
    def held(self, layout: BucketLayout, names: Sequence[str], route: Route) -> int:
        pieces = self._pieces(layout, names, route.axis.size)
        if not self._method.approximates(pieces):
            return super().held(layout, names, route)
        return self._method.held(route.axis, pieces, everywhere=True)

    def _pieces(self, layout: BucketLayout, names: Sequence[str], size: int) -> SlicesByRank:
        """Return a piece of the bucket for each rank, about as long, with whole parameters."""
        flat_slice = layout.flat_slice(names)
        if layout.dtype not in (torch.float32, torch.float64):  # factors of others would be noise
            flat_slice = replace(flat_slice, spans=())
        edges = []
        for edge, _ in chunk_bounds(flat_slice.numel, size):
            at = bisect_right(flat_slice.spans, edge, key=lambda span: span.start) - 1
            inside = at >= 0 and edge < flat_slice.spans[at].stop
            edges.append(flat_slice.spans[at].start if inside else edge)
        return [[flat_slice.cut(*each)] for each in pairwise([*edges, flat_slice.numel])]


# --- the compression that the options choose ---


def hook_of(config: DdpConfig, precision: Precision) -> CommunicationHook:
    """Return the hook that the options name, or a cast to the policy's dtype."""
    if precision.reduce is not None:
        return CommunicationHook(precision.reduce_dtype)
    if config.hook == "powersgd":
        on_wire = _on_wire(config.powersgd_dtype)
        return PowerSgdHook(config.powersgd_rank, config.powersgd_start_step, on_wire)
    return CommunicationHook(_on_wire(config.hook))


def _on_wire(word: str) -> OnWire:
    """Return the dtype on the wire for each dtype of gradients: wider ones are narrowed."""
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(word)
    if narrow is None:
        return as_it_is
    return lambda dtype: dtype if dtype.is_complex or dtype.itemsize <= narrow.itemsize else narrow
