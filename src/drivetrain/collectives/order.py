"""The order of operations: ranks that are about to do different things never exchange data.

Ranks that take different paths through a model or a training loop submit different operations.
Unchecked, this is a hang, values in the wrong place, gradients of different steps in one mean or,
where a message is longer than its buffer, the end of the process. Checked, each operation has a
header, and costs no message more::

    tags   a checksum of the header is part of the tags of all messages of the operation: ranks with
           different headers do not take each other's data, and wait
    words  a rank that has waited for half a second says in the store which operation it has under
           way (``meeting``): equal numbers with different headers prove that the wait is in vain

The rank that finds this raises and closes its connections, which ends the wait of all others.
"""

import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.collectives.communicator import Reduction, Request
from drivetrain.collectives.volume import Chunks, Layout, byte_lengths
from drivetrain.errors import CollectiveError
from drivetrain.traffic import Page

_MASK = (1 << 32) - 1

PARTS = "bytes"
"""The dtype of parts in a header, because parts of many dtypes are counted in bytes."""


class Header(NamedTuple):
    """A rank's next operation on a communicator.

    Attributes:
        number: the operation's sequence number on its communicator, from 1.
        elements: how many the tensor has; of parts, their bytes.
        plan: checksum of operation, dtype, chunks, source, reduction, and lengths and dtypes of
            parts.
        name: checksum of the label that the caller gave; 0 without a label: the path of the code
            may differ between hosts.
        operation: which collective.
        dtype: the tensor's, as in "float32"; of parts, "bytes".
        steps: optimizer steps that the rank had taken.
        backwards: backwards that the rank had begun.
        label: of the caller, or the line of the call; not compared.
        axis: name of the mesh axis; not compared.
    """

    number: int
    elements: int
    plan: int
    name: int
    operation: str
    dtype: str
    steps: int
    backwards: int
    label: str
    axis: str

    @classmethod
    def of(
        cls, request: Request, number: int, label: str, flat: Tensor | None, page: Page, axis: str
    ) -> "Header":
        """Return the header of a request; label is the caller's, or the line of the call.

        There is no flat tensor where the request is about parts.
        """
        plan, name, dtype, elements = _kind(
            request.operation,
            request.label,
            tuple(request.chunks or ()),
            request.source,
            request.reduction,
            request.layout,
            None if flat is None else flat.dtype,
        )
        if flat is not None:
            elements = flat.numel()
        steps, backwards = page
        operation = request.operation
        return cls(number, elements, plan, name, operation, dtype, steps, backwards, label, axis)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Header":
        """Return the header that ``to_json`` described."""
        return cls(**facts)

    def to_json(self) -> dict[str, Any]:
        """Return plain values by name."""
        return self._asdict()

    @property
    def summary(self) -> tuple[str, int, str, str]:
        """Operation, elements, dtype and label."""
        return self.operation, self.elements, self.dtype, self.label

    def checksum(self) -> int:
        """Return 32 bits that differ for different headers, but for the rarest chance."""
        # Hashes of numbers, unlike those of texts, are the same in every process.
        return hash((self[:4], self.steps, self.backwards)) & _MASK

    def differences(self, other: "Header") -> list[str]:
        """Return the difference between two headers that should be equal, in words."""
        pairs = {
            "sequence number": (self.number, other.number),
            "operation": (self.operation, other.operation),
            "elements": (self.elements, other.elements),
            "dtype": (self.dtype, other.dtype),
            "label": (self.name, other.name),
            f"optimizer steps before ({self.steps} and {other.steps})": (self.steps, other.steps),
            f"backwards before ({self.backwards} and {other.backwards})": (
                self.backwards,
                other.backwards,
            ),
        }
        found = [words for words, (mine, theirs) in pairs.items() if mine != theirs]
        if not found and self.plan != other.plan:  # other sizes have other chunks anyway
            parts = self.dtype == PARTS
            return ["lengths or dtypes of parts" if parts else "chunks, source or reduction"]
        return found

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} of {self.elements} {self.dtype} ({self.label})"


@lru_cache(maxsize=1 << 12)
def _kind(
    operation: str,
    label: str,
    chunks: Chunks,
    source: int,
    reduction: Reduction,
    layout: Layout | None,
    dtype: torch.dtype | None,
) -> tuple[int, int, str, int]:
    """Return plan, name, dtype, and bytes of parts; steps bring the same operations again."""
    # Unlike the hash of a text, this checksum is equal in every process.
    facts = repr((operation, chunks, source, reduction, layout, dtype))
    plan, name = zlib.crc32(facts.encode()), zlib.crc32(label.encode())
    if dtype is None:
        return plan, name, PARTS, sum(byte_lengths(layout or ()))
    return plan, name, str(dtype).removeprefix("torch."), 0


def disagreement(
    mine: Header, theirs: Header, sites: tuple[str, str], ranks: tuple[int, int]
) -> CollectiveError:
    """Return the error of two ranks that are about to do different things.

    Args:
        mine: the header of this rank.
        theirs: the header of the other rank.
        sites: lines of the script where both wait, "" where unknown.
        ranks: this one and the other one.
    """
    here, there = (f" ({site})" if site else "" for site in sites)
    differences = mine.differences(theirs)
    left_out = ""
    if mine.steps != theirs.steps or mine.backwards != theirs.backwards:
        left_out = "one of them has left out a backward or a step, or has one too many; "
    return CollectiveError(
        f"ranks must run the same operations in the same order on axis {mine.axis!r}; found "
        f"{mine} on rank {ranks[0]}, this one{here}, but {theirs} on rank {ranks[1]}{there}: they "
        f"differ in {', '.join(differences)}; {left_out}the ranks took different paths through the "
        "model or the training loop: let every rank run the same modules in the same order, "
        "whatever its data or rank says"
    )
