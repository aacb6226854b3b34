"""The message of one rank's tensors: matrices encoded piece by piece, other elements as they are.

::

    | finite? | pieces of the first matrix | ... of the last matrix | other elements as they are |
      4 bytes   as many bytes as the encoding needs                   as many as they have

Vectors, small matrices and elements of no parameter are few, and count much. An encoding goes over
its numbers several times, with one operation of torch each, and so does what is done before and
after: errors are added, sums are made. On the CPU a piece stays in the caches all the time, so each
number and each error is read from memory once. On other devices a few large operations are faster:
there a matrix is one piece.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drivetrain.collectives.stretch import ParameterSpan, Stretch

MARK_BYTES = 4
"""The first bytes of a message say whether all encoded elements are finite."""

_ALIGNMENT = 4
"""The bytes of a matrix begin at a multiple: fp32 may be among them."""

_PIECE = 2**18
"""Numbers of a piece, about: in fp32, with two scratch tensors as large, 3 MiB of a cache. With
fewer numbers the calls take longer than the arithmetic; with more, memory does."""


class Encoding(Protocol):
    """Turns fp32 numbers into bytes and back.

    All arguments are of one range of numbers: values and errors fp32, 1-D and contiguous, and a
    message of ``nbytes`` elements, uint8, at an address that fp32 may have.
    """

    @property
    def group(self) -> int:
        """Numbers that can be encoded by themselves, in as many bytes as within a longer range.

        The bytes are a multiple of 4.
        """

    def encodes(self, span: ParameterSpan, dtype: torch.dtype) -> bool:
        """Return whether a parameter's elements are encoded; otherwise they go as they are."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many encoded elements."""

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write numbers as bytes; where one is infinite or NaN, decoding must give such a one."""

    def encode_gradients(
        self,
        values: Tensor,
        message: Tensor,
        *,
        errors: Tensor | None = None,
        draws: torch.Generator | None = None,
    ) -> None:
        """Write gradients, plus the errors of each, as bytes; roundings by chance draw."""

    def decode(self, message: Tensor, values: Tensor) -> None:
        """Write the numbers of a message."""

    def add(self, message: Tensor, values: Tensor) -> None:
        """Add the numbers of a message to values."""

    def keep(self, values: Tensor, message: Tensor, errors: Tensor) -> None:
        """Replace errors by values plus errors minus the numbers of a message."""


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


class EncodedPiece(NamedTuple):
    """A range of one matrix that is encoded by itself.

    Attributes:
        elements: of one of the tensors.
        place: the same elements among all that are encoded.
        room: their bytes in a message.
    """

    elements: ElementRange
    place: slice
    room: slice


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
        self._plain_from = MARK_BYTES
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
        self._plain_from += self._aligned(elements.numel)

    def _aligned(self, numel: int) -> int:
        """Return the bytes of so many elements of a matrix, with those before the next matrix."""
        return -(-self._encoding.nbytes(numel) // _ALIGNMENT) * _ALIGNMENT

    def room(self, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    # --- encoded elements ---

    def pieces(self, device: torch.device) -> Iterator[EncodedPiece]:
        """Yield the pieces of all matrices, in order, for tensors and messages on a device."""
        group = self._encoding.group
        step = max(1, _PIECE // group) * group if device.type == "cpu" else max(1, self.numel)
        edge, place = MARK_BYTES, 0
        for index, first, last in self._encoded:
            room = edge
            for start in range(first, last, step):
                stop = min(start + step, last)
                end = room + self._encoding.nbytes(stop - start)
                elements = ElementRange(index, start, stop)
                yield EncodedPiece(elements, slice(place, place + stop - start), slice(room, end))
                place, room = place + stop - start, end
            edge += self._aligned(last - first)

    def load(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a copy of the elements to encode: fp32, 1-D."""
        device = tensors[0].device if tensors else None
        values = torch.empty(self.numel, dtype=torch.float32, device=device)
        places = values.split_with_sizes([each.numel for each in self._encoded])
        for each, place in zip(self._encoded, places, strict=True):
            place.copy_(each.of(tensors))
        return values

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
