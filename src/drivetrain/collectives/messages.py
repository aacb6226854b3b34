"""How the tensors of one rank become messages, and messages become tensors again.

A large tensor travels as it lies, in slices: nothing is copied. Small ones of one dtype travel
together, through a buffer: to copy them costs less than a message of their own::

    tensors    [ large           ] [s] [t] [ large ] [u]
    messages   [       ] [       ]         [       ]     [s t u]

Whoever knows lengths and dtypes knows the messages, so sender and receiver agree on them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PACKED_SHARE = 16
"""A piece is small if a message has room for so many pieces of its size."""


class ChunkMessages:
    """The chunk of one rank, cut into messages.

    Args:
        tensors: 1-D and contiguous, may be empty.
        piece_bytes: the longest message.

    Attributes:
        messages: what is sent or received, in order: 1-D tensors, none of them empty; slices of
            the tensors, or buffers.
    """

    def __init__(self, tensors: Sequence[Tensor], piece_bytes: int) -> None:
        self.messages: list[Tensor] = []
        self._packs: list[tuple[Tensor, list[Tensor]]] = []
        small: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            for piece in _slices(tensor, piece_bytes):
                if piece.nbytes * PACKED_SHARE <= piece_bytes:
                    small.setdefault(piece.dtype, []).append(piece)
                else:
                    self.messages.append(piece)
        for pieces in small.values():
            for group in _groups(pieces, piece_bytes):
                self._add(group)

    def pack(self) -> None:
        """Fill the buffers from the tensors, before their messages are sent or added to."""
        for buffer, pieces in self._packs:
            torch.cat(pieces, out=buffer)

    def unpack(self) -> None:
        """Fill the tensors from the buffers, when their messages have come or are complete."""
        for buffer, pieces in self._packs:
            lengths = [piece.numel() for piece in pieces]
            torch._foreach_copy_(pieces, torch.split(buffer, lengths))

    def _add(self, pieces: list[Tensor]) -> None:
        if len(pieces) == 1:
            self.messages.append(pieces[0])
            return
        buffer = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
        self._packs.append((buffer, pieces))
        self.messages.append(buffer)


def _slices(tensor: Tensor, piece_bytes: int) -> Sequence[Tensor]:
    """Cut a tensor into slices: none of an empty one, here as on the other side."""
    if tensor.nbytes <= piece_bytes:
        return [tensor] if tensor.numel() else []
    return torch.split(tensor, piece_bytes // tensor.element_size())


def _groups(pieces: list[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Yield the pieces, in order, in groups as large as a message may be."""
    group: list[Tensor] = []
    nbytes = 0
    for piece in pieces:
        if nbytes + piece.nbytes > piece_bytes:
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += piece.nbytes
    yield group
