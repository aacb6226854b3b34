"""Another dtype on the wire: gradients are converted, summed, and converted back."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drivetrain.collectives import Communicator, sent_elements
from drivetrain.parts.buckets import Bucket, BucketLayout
from drivetrain_ddp.compression.hook import CommunicationHook, Exchange


def wire_dtype(name: str) -> torch.dtype:
    """Return the dtype that a hook named ``bf16`` or ``fp16`` sends."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


def narrowing(dtype: torch.dtype) -> Callable[[torch.dtype], torch.dtype]:
    """Return a rule for ``CastHook``: narrow wider gradients to this dtype, leave others."""

    def on_wire(given: torch.dtype) -> torch.dtype:
        return given if given.is_complex or given.itemsize <= dtype.itemsize else dtype

    return on_wire


class _Cast:
    """A converted bucket under way."""

    __slots__ = ("_bucket", "_handle", "_rounded")

    def __init__(self, bucket: Bucket, rounded: Tensor, communicator: Communicator) -> None:
        self._bucket = bucket
        self._rounded = rounded
        rounded.copy_(bucket.flat)
        self._handle = communicator.all_reduce(rounded, label="gradient bucket, cast")

    def finish(self) -> None:
        """Wait and convert the sum into the bucket."""
        self._handle.wait()
        self._bucket.flat.copy_(self._rounded)


class CastHook(CommunicationHook):
    """Sends gradients in another dtype.

    Args:
        on_wire: maps the dtype of gradients to the dtype in which they are sent.
    """

    def __init__(self, on_wire: Callable[[torch.dtype], torch.dtype]) -> None:
        self._on_wire = on_wire
        self._rounded: dict[BucketLayout, Tensor] = {}

    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Exchange:
        """Convert the bucket and all-reduce the copy."""
        rounded = self._rounded.get(bucket.layout)
        if rounded is None:
            rounded = torch.empty_like(bucket.flat, dtype=self._on_wire(bucket.layout.dtype))
            self._rounded[bucket.layout] = rounded
        return _Cast(bucket, rounded, communicator)

    def sent(self, layout: BucketLayout, size: int) -> int:
        """Return the bytes of a ring over the copy."""
        elements = sent_elements("all_reduce", layout.numel, size=size)
        return elements * self._on_wire(layout.dtype).itemsize

    def held(self, layout: BucketLayout) -> int:
        """Return the bytes of the copy, which is kept and used again."""
        return layout.numel * self._on_wire(layout.dtype).itemsize

    def forget(self) -> None:
        """Drop the copies."""
        self._rounded.clear()
