"""Approximate sums between hosts on paper: exact inside of hosts, then encoded between them.

A host sums its ranks' gradients; then the ranks at one place of each host exchange what a method
sends of their part (docs/slow-links.md). The method itself says its bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from drivetrain.paper.work import Collective, MemoryPass, Operation

PASSES = 4.5
"""Bytes that an encoding reads and writes per byte of gradients: gradient and kept error read, the
error written, codes written and read, and the sum of the others' numbers; an estimate."""


@dataclass(frozen=True, slots=True)
class FarMethod:
    """A method for gradients between hosts.

    Attributes:
        name: of the method.
        sent: bytes that a rank sends per exact byte of its part, where all ranks get the sum.
        sent_divided: the same where each rank gets a share.
        held: bytes that are kept from step to step, likewise.
    """

    name: str
    sent: float
    sent_divided: float
    held: float

    def messages(
        self, axis: str, nbytes: float, together: int, hosts: int, *, divided: bool
    ) -> Iterator[tuple[str, tuple[Operation, ...]]]:
        """Yield (axis, operations) of one sum.

        Args:
            axis: over which gradients are summed.
            nbytes: of the gradients.
            together: ranks of the axis on one host.
            hosts: that the axis is over.
            divided: whether each rank gets a share of the sum alone.
        """
        part = nbytes / together
        near = f"{axis}.near"
        if together > 1:
            yield near, (Collective(near, "reduce_scatter", nbytes),)
        # An exchange of m bytes sends m (hosts - 1) / hosts.
        ratio = self.sent_divided if divided else self.sent
        exchange = Collective(f"{axis}.far", "all_to_all", part * ratio * hosts / (hosts - 1))
        encoding = MemoryPass(PASSES * part, 0, kind=f"encode {self.name}")
        yield f"{axis}.far", (encoding, exchange)
        if together > 1 and not divided:
            yield near, (Collective(near, "all_gather", nbytes),)
