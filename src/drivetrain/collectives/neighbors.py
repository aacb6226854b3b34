"""Messages between neighbors on a ring, and the order of operations that all ranks keep.

The order of operations: ranks that are about to do different things never exchange data.

Ranks that take different paths through a model or a training loop submit different operations.
Unchecked, this is a hang, values in the wrong place, gradients of different steps in one mean or,
where a message is longer than its buffer, the end of the process. Checked, each operation has a
header, and costs no message more::

    tags   a checksum of the header is part of the tags of all messages of the operation: ranks with
           different headers do not take each other's data, and wait
    words  a rank that has waited for half a second says in the store which operation it has under
           way (``facts``): equal numbers with different headers prove that the wait is in vain

The rank that finds this raises and closes its connections, which ends the wait of all others.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.collectives.communicator import Reduction, Request
from drivetrain.collectives.volume import Chunks, Layout, byte_lengths
from drivetrain.errors import CollectiveError
from drivetrain.runtime.mesh import Axis
from drivetrain.traffic import Page

# --- the two neighbors of a rank on a ring, the messages between them ---


class Tag(IntEnum):
    """The purpose of a message; messages with the same tag arrive in the order of sending."""

    SCATTER = 0
    """A piece of a sum that is not complete."""
    GATHER = 1
    """A final piece, to be copied to every rank; may be under way beside a piece of a sum."""
    ALARM = 2
    """Never sent: its receive ends only with the connection."""


TAG_MASK, LANE_SHIFT = (1 << 31) - 1, 12
"""A tag has 31 bits; the upper 19 are for the checksum of an operation, the rest for its ring and
the purpose of a message."""


class Neighbors:
    """Messages to the right neighbor and from the left one, over one gloo group.

    Several users of one group, one per model, may be at work at once: each adds its own multiple
    to the tags. The tags of an operation depend on its header, so that ranks which are about to do
    different things never take each other's data, see ``order``; gloo ends the process when a
    message is longer than the buffer that waits for it.

    Args:
        axis: the mesh axis.
        group: its gloo group; only neighbors may send point-to-point messages on it.
        timeout: how long to wait for one message.
    """

    def __init__(self, axis: Axis, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.axis = axis
        self.right = (axis.rank + 1) % axis.size
        self.left = (axis.rank - 1) % axis.size
        self.timeout = timeout
        self._group = group
        self._places = axis.places or range(axis.size)
        self._first_tag = len(Tag) * next(axis.streams)
        self._lane = 0

    def send(self, piece: Tensor, tag: Tag, to: int | None = None) -> Any:
        """Start to send a tensor to the right, or to another rank of the axis.

        It must live and stay as it is until waited for.
        """
        to = self.right if to is None else to
        return self._group.send([piece], self._places[to], self.number(tag))

    def receive(self, piece: Tensor, tag: Tag, source: int | None = None) -> Any:
        """Start to fill a tensor from the left, or from another rank of the axis."""
        source = self.left if source is None else source
        return self._group.recv([piece], self._places[source], self.number(tag))

    def number(self, tag: Tag) -> int:
        """Return the backend's tag, below 2**31."""
        return (self._first_tag + tag + (self._lane << LANE_SHIFT)) & TAG_MASK

    def begin(self, checksum: int) -> None:
        """Get ready for the messages of an operation, given the checksum of its header."""
        self._lane = checksum

    def wait(self, message: Any) -> None:
        """Wait for a message.

        Raises:
            RuntimeError: it failed or timed out.
        """
        message.wait(self.timeout)

    def finish(self, messages: Sequence[Any]) -> None:
        """Wait for messages.

        Raises:
            RuntimeError: one failed or timed out.
        """
        # The last one first: when it is through, the others are, and this thread woke up once.
        for message in reversed(messages):
            self.wait(message)

    def alarm(self) -> None:
        """Close this rank's connections, so that the failure reaches every rank at once.

        Only the neighbors of a dead rank notice; the others wait for neighbors that live. gloo
        closes all connections of a group when one wait times out: so let one time out. On both
        sides, because the wait for a rank known to be dead fails without a timeout.
        """
        for neighbor in (self.left, self.right):
            token = torch.empty(1, dtype=torch.uint8, device="cpu")
            with suppress(RuntimeError):
                place, tag = self._places[neighbor], self.number(Tag.ALARM)
                receive = self._group.recv([token], place, tag)
                receive.wait(timedelta(milliseconds=1))


# --- receives a rank's pieces of sums, a few at a time, in buffers that are used again ---


WINDOW = 4
"""Pieces of a reduction that may be under way to this rank; each needs a receive buffer."""

CACHE_LINE = 64
"""Bytes: buffers that share no line of the cache do not slow each other down."""


def arrivals_bytes(longest: int) -> int:
    """Return the bytes of the receive buffers for pieces of at most so many bytes."""
    return WINDOW * -(-longest // CACHE_LINE) * CACHE_LINE


class Arrivals:
    """Receives the left neighbor's pieces in order, ahead of their use.

    Args:
        neighbors: of this rank.
    """

    def __init__(self, neighbors: Neighbors) -> None:
        self._neighbors = neighbors
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, pieces: list[Tensor]) -> Iterator[Tensor]:
        """Return the left neighbor's message for each piece; valid until the next is asked for.

        The first messages are waited for from now on, not from the first use on.
        """
        slot = self._make_room(pieces)
        posted = [self._post(index, piece, slot) for index, piece in enumerate(pieces[:WINDOW])]
        return self._arriving(pieces, slot, posted)

    def forget(self) -> None:
        """Let go of the buffers."""
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _arriving(
        self, pieces: list[Tensor], slot: int, posted: list[tuple[Tensor, Any]]
    ) -> Iterator[Tensor]:
        for index in range(len(pieces)):
            buffer, receive = posted[index]
            self._neighbors.wait(receive)
            yield buffer
            following = index + WINDOW
            if following < len(pieces):
                posted.append(self._post(following, pieces[following], slot))

    def _post(self, index: int, piece: Tensor, slot: int) -> tuple[Tensor, Any]:
        """Post the receive for a piece, in the buffer that is free by then."""
        start = index % WINDOW * slot
        buffer = self._scratch[start : start + piece.nbytes].view(piece.dtype)
        return buffer, self._neighbors.receive(buffer, Tag.SCATTER)

    def _make_room(self, pieces: list[Tensor]) -> int:
        """Return the bytes of a reused receive buffer, which the largest piece fits in."""
        longest = max((piece.nbytes for piece in pieces), default=0)
        needed = arrivals_bytes(longest)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8, device="cpu")
        return needed // WINDOW


# --- the order of operations ---

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
