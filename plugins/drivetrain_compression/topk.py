"""The largest numbers of each chunk, with 12-bit places and 2-bit values.

Of a chunk of 4,096 numbers the 64 of largest size are sent. Each chunk has a codebook of 4 values:
the numbers that are sent fall into 4 bins over three standard deviations to both sides of zero, and
the codebook holds the mean of each bin::

    | codebooks, 4 x fp32 per chunk | places, 12 bits each | bins, 2 bits each |

So 64 numbers take 128 bytes where fp32 takes 16,384: 128 times fewer. A codebook of its own lets a
chunk of small numbers keep its values beside a chunk of large numbers. The code is that of Sarfi et
al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (arXiv 2508.15706); there it
carries pseudo-gradients of many local steps. Here it carries the gradients of each step, with error
feedback: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018. No bin reaches over
zero, so that a code never has a larger error than sending nothing, as their analysis needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.compression.compressor import Fidelity
from drivetrain.config.option import option
from drivetrain.errors import ConfigError
from drivetrain_compression.compiled import Compiled, CompiledOptions, Format

CHUNK = 4096
"""Numbers of a chunk: a place in it has 12 bits."""

_BINS, _DEVIATIONS = 4, 3.0
_BOOK_BYTES = 4 * _BINS


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKOptions(CompiledOptions):
    """Options of ``topk``."""

    keep: int = option(
        64, help="numbers of each 4,096 that are sent; a multiple of 4", minimum=4, maximum=1024
    )

    def __post_init__(self) -> None:
        if self.keep % 4:
            raise ConfigError(
                f"expected links.far.options.keep to be a multiple of 4, found {self.keep}; four "
                "bins fill a byte"
            )


class TopK(Compiled[TopKOptions]):
    """The largest numbers of each chunk."""

    summary: ClassVar[str] = (
        "the 64 largest of each 4,096 numbers, with 2-bit values: 1/128 of the bytes"
    )
    fidelity: ClassVar[Fidelity] = Fidelity.THEORY
    parameters: ClassVar[bool] = False  # of values, almost all would be zeros
    sparse: ClassVar[bool] = True
    keeps_feedback = True
    group = 4 * CHUNK  # a chunk may have an odd number of bytes
    Config: ClassVar[type] = TopKOptions
    form: ClassVar[Format] = Format.TOPK

    @override
    def nbytes(self, numel: int) -> int:
        each = _BOOK_BYTES + self.config.keep * 3 // 2 + self.config.keep // 4
        return self._chunks(numel) * each

    @property
    @override
    def figure(self) -> int:
        return self.config.keep

    @override
    def encode_by_torch(self, values: Tensor, message: Tensor) -> None:
        books, place_bytes, bin_bytes = self._parts(message, values.numel())
        places = torch.empty(len(books), self.config.keep, dtype=torch.int64, device=values.device)
        numbers = values.new_empty(places.shape)
        for chunks, found, taken in _in_pieces(values, places, numbers):
            found.copy_(self._largest(chunks.abs()))
            torch.gather(chunks, 1, found, out=taken)
        bins = _write_books(numbers, books)
        _write_places(places.view(-1), place_bytes)
        _write_bins(bins.view(-1), bin_bytes)

    @override
    def decode_by_torch(self, message: Tensor, values: Tensor) -> None:
        books, place_bytes, bin_bytes = self._parts(message, values.numel())
        numbers = books.gather(1, _read_bins(bin_bytes).view(-1, self.config.keep))
        places = _read_places(place_bytes).view(-1, self.config.keep)
        for chunks, found, taken in _in_pieces(values, places, numbers):
            chunks.zero_().scatter_(1, found, taken)

    def _largest(self, sizes: Tensor) -> Tensor:
        """Return the places of the largest numbers of each chunk.

        A chunk is a table of some rows; only the columns with the largest maxima are searched. As
        many columns as numbers are sent are enough: if a number of another column were among the
        largest, the maxima of all these columns would be as large.

        Args:
            sizes: absolute values, (chunks, 4,096).

        Returns:
            int64, (chunks, keep), in the order of places: so equal numbers make equal messages on
            every machine.
        """
        keep = self.config.keep
        height = 2 ** (((CHUNK // keep).bit_length() - 1) // 2)  # so both searches are alike long
        width = CHUNK // height
        maxima = sizes.view(-1, height, width).amax(1)
        columns = maxima.topk(keep, dim=1, sorted=False).indices
        starts = torch.arange(0, CHUNK, width, device=sizes.device)
        searched = (starts[:, None] + columns[:, None, :]).flatten(1)
        largest = sizes.gather(1, searched).topk(keep, dim=1, sorted=False).indices
        return searched.gather(1, largest).sort(dim=1).values

    def _chunks(self, numel: int) -> int:
        return -(-numel // CHUNK)

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return codebooks (chunks, 4), the bytes of places and the bytes of bins."""
        chunks = self._chunks(numel)
        first, second = chunks * _BOOK_BYTES, chunks * self.config.keep * 3 // 2
        books, places, bins = message.split_with_sizes(
            [first, second, message.numel() - first - second]
        )
        return books.view(torch.float32).view(chunks, _BINS), places, bins


def _in_pieces(
    values: Tensor, places: Tensor, numbers: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield all whole chunks, and then a shorter last chunk.

    Args:
        values: 1-D.
        places: of the numbers that are sent, (chunks, keep).
        numbers: those that are sent, (chunks, keep).

    Yields:
        Chunks, a view of (some, 4,096), and the rows of places and numbers that belong to them. For
        the shorter chunk: a copy with zeros behind, of which changes go to the values afterwards.
    """
    whole = values.numel() // CHUNK
    rows, last = values[: whole * CHUNK].view(-1, CHUNK), values[whole * CHUNK :]
    if whole:
        yield rows, places[:whole], numbers[:whole]
    if last.numel():
        padded = values.new_zeros(1, CHUNK)
        padded[0, : last.numel()] = last
        yield padded, places[whole:], numbers[whole:]
        last.copy_(padded[0, : last.numel()])


def _write_books(numbers: Tensor, books: Tensor) -> Tensor:
    """Write the mean of each bin of each chunk; return the bin of each number.

    Args:
        numbers: those that are sent, (chunks, keep).
        books: (chunks, 4).
    """
    doubles = numbers.double()  # squares of large numbers of fp32 are finite, too
    widths = doubles.square().mean(1, keepdim=True).sqrt_().mul_(2 * _DEVIATIONS / _BINS)
    scaled = torch.nan_to_num(doubles / widths) + _BINS / 2
    bins = scaled.floor_().clamp_(0, _BINS - 1).to(torch.int64)
    # Of NaN and infinity, sums are such; double precision makes their order harmless.
    sums = doubles.new_zeros(books.shape).scatter_add_(1, bins, doubles)
    counts = doubles.new_zeros(books.shape).scatter_add_(1, bins, torch.ones_like(doubles))
    books.copy_(sums / counts.clamp_(min=1))
    return bins


def _write_places(places: Tensor, message: Tensor) -> None:
    """Write two places of 12 bits in three bytes."""
    first, second = places.view(-1, 2).unbind(1)
    three = message.view(-1, 3)
    three[:, 0] = first & 255
    three[:, 1] = (first >> 8) | ((second & 15) << 4)
    three[:, 2] = second >> 4


def _read_places(message: Tensor) -> Tensor:
    low, middle, high = message.view(-1, 3).to(torch.int64).unbind(1)
    return torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=1).view(-1)


def _write_bins(bins: Tensor, message: Tensor) -> None:
    """Write four bins of 2 bits in a byte."""
    one, two, three, four = bins.view(-1, 4).unbind(1)
    message.copy_(one | (two << 2) | (three << 4) | (four << 6))


def _read_bins(message: Tensor) -> Tensor:
    wide = message.to(torch.int64)
    return torch.stack([(wide >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).view(-1)
