"""Half precision on the wire: gradients are rounded, summed, and widened again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drivetrain.parts.buckets import Bucket, BucketLayout
from drivetrain.parts.collectives import Communicator, sent_elements
from drivetrain_ddp.compression.hook import CommunicationHook, Exchange


def wire_dtype(name: str) -> torch.dtype:
    """Return the dtype that a hook named ``bf16`` or ``fp16`` sends."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


class _Cast:
    """A rounded bucket under way."""

    __slots__ = ("_bucket", "_handle", "_rounded")

    def __init__(self, bucket: Bucket, rounded: Tensor, communicator: Communicator) -> None:
        self._bucket = bucket
        self._rounded = rounded
        rounded.copy_(bucket.flat)
        self._handle = communicator.all_reduce(rounded, label="gradient bucket, cast")

    def finish(self) -> None:
        """Wait and widen the sum into the bucket."""
        self._handle.wait()
        self._bucket.flat.copy_(self._rounded)


class CastHook(CommunicationHook):
    """Sends gradients in a narrower dtype; those that are not wider are sent as they are.

    Args:
        dtype: the dtype on the wire.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rounded: dict[BucketLayout, Tensor] = {}

    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Exchange:
        """Round the bucket and all-reduce what is left of it."""
        rounded = self._rounded.get(bucket.layout)
        if rounded is None:
            rounded = torch.empty_like(bucket.flat, dtype=self._on_wire(bucket.layout))
            self._rounded[bucket.layout] = rounded
        return _Cast(bucket, rounded, communicator)

    def sent(self, layout: BucketLayout, size: int) -> int:
        """Return the bytes of a ring over the rounded bucket."""
        elements = sent_elements("all_reduce", layout.numel, size=size)
        return elements * self._on_wire(layout).itemsize

    def held(self, layout: BucketLayout) -> int:
        """Return the bytes of the rounded copy, which is kept and used again."""
        return layout.numel * self._on_wire(layout).itemsize

    def forget(self) -> None:
        """Drop the copies."""
        self._rounded.clear()

    def _on_wire(self, layout: BucketLayout) -> torch.dtype:
        if layout.dtype.is_complex or layout.dtype.itemsize <= self._dtype.itemsize:
            return layout.dtype
        return self._dtype
