"""Receives a rank's pieces of sums on a ring, a few at a time, in buffers that are used again."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from drivetrain.collectives.neighbors import Neighbors, Tag

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
