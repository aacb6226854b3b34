"""The interface between the reducer and the compression of buckets on the wire."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from drivetrain.collectives import Communicator
from drivetrain.parts.buckets import Bucket, BucketLayout


class Exchange(Protocol):
    """A bucket on its way."""

    def finish(self) -> None:
        """Return when the bucket's flat tensor, tail included, holds the sum over ranks."""


class CommunicationHook(ABC):
    """Turns a full bucket into its sum over the ranks; gradients are divided by N before.

    ``start`` is called for the same buckets in the same order on every rank, and ``finish`` of the
    exchanges in that order as well.
    """

    @abstractmethod
    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Exchange:
        """Start to sum a bucket over the ranks.

        Args:
            bucket: gradients / N and tail, complete; views without a gradient are zero.
            missing: indices in the bucket of parameters without a gradient on this rank.
            communicator: the data-parallel axis.
        """

    @abstractmethod
    def sent(self, layout: BucketLayout, size: int) -> int:
        """Return the bytes that rank 0 of ``size`` ranks sends for a bucket, per optimizer step."""

    def held(self, layout: BucketLayout) -> int:
        """Return the bytes that the hook holds for a bucket between steps."""
        return 0

    def forget(self) -> None:
        """Drop the state of every bucket: the buckets are about to change."""
        return
