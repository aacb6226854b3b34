"""Collectives over one mesh axis: ``connect`` picks the algorithm, a ``Communicator`` runs it.

======== =========================== ==========================================================
solo     one rank                    nothing to do: every handle is finished
ring     CPU tensors over gloo       our pipelined ring on point-to-point messages, run by one
                                     communication thread, so that it overlaps with compute
native   everything else             the asynchronous operations of ``torch.distributed``
======== =========================== ==========================================================

Whatever the algorithm, operations run in the order in which they were submitted, which must be the
same on every rank (a ring that is ``checked`` says where it is not), and the ledger gets the bytes
that the ring algorithm sends.

Most operations work on one flat tensor. ``gather_parts`` and ``reduce_parts`` work on many of any
sizes and dtypes: the ring sends large ones as they lie and packs small ones into few messages, the
others copy all side by side.
"""

from drivetrain.collectives.communicator import Communicator, Handle, Reduction
from drivetrain.collectives.connect import connect
from drivetrain.collectives.parts import Parts
from drivetrain.collectives.volume import Operation, chunk_bounds, sent_bytes, sent_elements

__all__ = [
    "Communicator",
    "Handle",
    "Operation",
    "Parts",
    "Reduction",
    "chunk_bounds",
    "connect",
    "sent_bytes",
    "sent_elements",
]
