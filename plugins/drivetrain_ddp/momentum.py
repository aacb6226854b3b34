"""A bucket on the wire after the warm-up of 1-bit Adam: momenta in the place of gradients."""

from collections.abc import Sequence

from typing_extensions import override

from drivetrain.collectives import Communicator
from drivetrain.links.one_bit_adam import FrozenAdam
from drivetrain.parts.buckets import Bucket
from drivetrain_ddp.compression import CommunicationHook, Finish


class MomentumHook(CommunicationHook):
    """Sums momenta over the ranks, for parameters whose variance is frozen; the others' gradients.

    Args:
        adam: has the momenta.
    """

    def __init__(self, adam: FrozenAdam) -> None:
        super().__init__()
        self._adam = adam

    @override
    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Finish:
        gradients = dict(zip(bucket.parameters, bucket.views, strict=True))
        turn_back = self._adam.exchange(gradients, communicator.size)
        wait = super().start(bucket, missing, communicator)

        def finish() -> None:
            wait()
            turn_back()

        return finish
