"""Messages between neighbors on a ring, with the tags of the operation that they belong to."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.runtime.mesh import Axis

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
    different things never take each other's data, see ``Header``; gloo ends the process when a
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
