"""The message of one rank's tensors: matrices encoded, all other elements as they are.

::

    | finite? | encoded elements of all matrices, side by side | other elements as they are |
      4 bytes   as many as the encoding needs                    as many as they have

Vectors, small matrices and elements of no parameter are few, and count much.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drivetrain.collectives.stretch import ParameterSpan, Stretch

MARK_BYTES = 4
"""The first bytes of a message say whether all encoded elements are finite."""


class Encoding(Protocol):
    """Turns fp32 numbers into bytes and back."""

    def encodes(self, span: ParameterSpan, dtype: torch.dtype) -> bool:
        """Return whether a parameter's elements are encoded; otherwise they go as they are."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many encoded elements."""

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write numbers as bytes; where one is infinite or NaN, decoding must give such a one.

        Args:
            values: fp32, 1-D.
            message: uint8, 1-D, of ``nbytes`` elements, at an address that fp32 may have.
        """

    def encode_gradients(self, values: Tensor, message: Tensor, seed: int) -> None:
        """Write gradients as bytes; draws, if there are any, begin with the seed."""

    def decode(self, message: Tensor, values: Tensor) -> None:
        """Write the numbers of a message; the arguments are as for ``encode``."""


class ElementRange(NamedTuple):
    """A range of elements of one of several tensors.

    Attributes:
        tensor: index of the tensor.
        start: first element.
        stop: one past the last.
    """

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the elements, as a view."""
        return tensors[self.tensor][self.start : self.stop]


class MessageLayout:
    """Where the elements of one rank's tensors lie in the message about them.

    Args:
        encoding: of the matrices.
        stretches: describe the tensors.

    Attributes:
        numel: how many elements are encoded.
        nbytes: of the whole message.
        spans: the encoded ranges of parameters; start and stop count encoded elements.
    """

    def __init__(self, encoding: Encoding, stretches: Sequence[Stretch]) -> None:
        self._encoding = encoding
        self._encoded: list[ElementRange] = []
        self._plain: list[ElementRange] = []
        self.spans: list[ParameterSpan] = []
        self.numel = 0
        plain_bytes = 0
        for index, stretch in enumerate(stretches):
            edge = 0
            for span in stretch.spans:
                if not encoding.encodes(span, stretch.dtype):
                    continue
                plain_bytes += self._leave(ElementRange(index, edge, span.start), stretch.dtype)
                self._take(ElementRange(index, span.start, span.stop), span)
                edge = span.stop
            plain_bytes += self._leave(ElementRange(index, edge, stretch.numel), stretch.dtype)
        self._plain_from = MARK_BYTES + encoding.nbytes(self.numel) if self.numel else MARK_BYTES
        self.nbytes = self._plain_from + plain_bytes

    def _leave(self, elements: ElementRange, dtype: torch.dtype) -> int:
        """Send elements as they are; return their bytes."""
        if elements.numel:
            self._plain.append(elements)
        return elements.numel * dtype.itemsize

    def _take(self, elements: ElementRange, span: ParameterSpan) -> None:
        stop = self.numel + elements.numel
        self.spans.append(replace(span, start=self.numel, stop=stop))
        self.numel = stop
        self._encoded.append(elements)

    def room(self, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    # --- encoded elements ---

    def load(self, tensors: Sequence[Tensor], *, errors: Tensor | None = None) -> Tensor:
        """Return a copy of the elements to encode, plus the errors of each: fp32, 1-D."""
        device = tensors[0].device if tensors else None
        values = torch.empty(self.numel, dtype=torch.float32, device=device)
        lengths = [each.numel for each in self._encoded]
        places = values.split_with_sizes(lengths)
        pieces = [each.of(tensors) for each in self._encoded]
        if errors is None:
            for place, piece in zip(places, pieces, strict=True):
                place.copy_(piece)
            return values
        kept = errors.split_with_sizes(lengths)
        for place, piece, added in zip(places, pieces, kept, strict=True):
            torch.add(piece, added, out=place)
        return values

    def store(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write fp32 values in the places of the encoded elements."""
        lengths = [each.numel for each in self._encoded]
        for each, piece in zip(self._encoded, values.split_with_sizes(lengths), strict=True):
            each.of(tensors).copy_(piece)

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write values into a message."""
        if self.numel:
            self._encoding.encode(values, message[MARK_BYTES : self._plain_from])

    def encode_gradients(self, values: Tensor, message: Tensor, seed: int) -> None:
        """Write gradients into a message."""
        if self.numel:
            self._encoding.encode_gradients(values, message[MARK_BYTES : self._plain_from], seed)

    def decode(self, message: Tensor, values: Tensor) -> None:
        """Read values from a message."""
        if self.numel:
            self._encoding.decode(message[MARK_BYTES : self._plain_from], values)

    # --- the other elements ---

    def write_plain(self, tensors: Sequence[Tensor], message: Tensor) -> None:
        """Copy the other elements into a message."""
        for piece, place in self._plain_pairs(tensors, message):
            place.copy_(piece.view(torch.uint8))

    def read_plain(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the other elements from a message."""
        for piece, place in self._plain_pairs(tensors, message):
            piece.view(torch.uint8).copy_(place)

    def add_plain(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Add the other elements of a message, in their own dtype."""
        for piece, place in self._plain_pairs(tensors, message):
            theirs = torch.empty_like(piece)
            theirs.view(torch.uint8).copy_(place)
            piece.add_(theirs)

    def _plain_pairs(
        self, tensors: Sequence[Tensor], message: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        pairs, edge = [], self._plain_from
        for each in self._plain:
            piece = each.of(tensors)
            pairs.append((piece, message[edge : edge + piece.nbytes]))
            edge += piece.nbytes
        return pairs


def mark(message: Tensor, *, finite: bool) -> None:
    """Say in a message whether the encoded elements are finite."""
    message[:MARK_BYTES] = int(finite)


def is_marked_finite(message: Tensor) -> bool:
    """Return whether a message says that its encoded elements are finite."""
    return bool(message[0])
