"""No compression: the bucket itself is all-reduced in place."""

from collections.abc import Sequence

from drivetrain.collectives import Communicator, sent_elements
from drivetrain.parts.buckets import Bucket, BucketLayout
from drivetrain_ddp.compression.hook import CommunicationHook, Exchange


class _Reduced:
    """An all-reduce under way; the bucket is its result."""

    __slots__ = ("finish",)

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        self.finish = communicator.all_reduce(bucket.flat, label="gradient bucket").wait


class PlainHook(CommunicationHook):
    """Sends every gradient in its own dtype."""

    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Exchange:
        """All-reduce the bucket."""
        return _Reduced(bucket, communicator)

    def sent(self, layout: BucketLayout, size: int) -> int:
        """Return the bytes of a ring over the flat tensor."""
        return sent_elements("all_reduce", layout.numel, size=size) * layout.dtype.itemsize
