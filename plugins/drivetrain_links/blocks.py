"""Blocks of integers with a scale each: a quarter or an eighth of the bytes of fp32.

A block of B numbers x becomes a scale s = max|x| / q and integers round(x / s) of -q to q, with q
= 127 for 8 bits and q = 7 for 4. The error of a number is at most s / 2::

    | scales, fp32: one per block | integers: one per number, or two in a byte |

Blocks and their all-to-all are those of Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", 2023 (arXiv 2306.10209), sections 3.1 and 3.3. It keeps no
errors; here gradients have error feedback, with which rounding to the nearest needs no chance
(Karimireddy et al., ICML 2019, theorem II: any contraction converges at the rate of SGD). Updates
of parameters have it, too (``drivetrain.links.encoded``); that training goes on as well with
rounded values of parameters is what experiments of the ZeRO++ paper found.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.config.option import option
from drivetrain.links.codec import Codec
from drivetrain.links.compressor import Honesty

_SCALE_BYTES = 4

_ZERO, _LOWER_BITS = 8, 15
"""4-bit integers of -7 to 7 are stored as 1 to 15."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    """Options of ``int8`` and ``int4``."""

    block: int = option(
        256, help="numbers that share a scale; fewer are more exact", minimum=16, maximum=65536
    )


class Blocks(Codec[BlockOptions]):
    """Blocks of numbers with a scale each; a subclass says how integers become bytes.

    Attributes:
        steps: the largest integer.
    """

    honesty: ClassVar[Honesty] = Honesty.THEORY
    keeps_feedback: ClassVar[bool] = True
    Config: ClassVar[type] = BlockOptions
    steps: ClassVar[int]

    @override
    @classmethod
    def honesty_of(cls, use: str) -> Honesty:
        return Honesty.EMPIRICAL if use == "parameters" else cls.honesty

    @override
    def nbytes(self, numel: int) -> int:
        return _SCALE_BYTES * self._count(numel) + self.integer_bytes(numel)

    @override
    def encode(self, values: Tensor, message: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        integers = torch.empty(values.numel(), dtype=torch.int8, device=values.device)
        for numbers, units, rounded in self._in_rows(values, scales, integers):
            torch.linalg.vector_norm(numbers, float("inf"), dim=1, out=units)
            units.div_(self.steps)
            # A block of zeros has the scale 0: any other divisor gives its zeros back.
            divisors = units.masked_fill(units == 0, 1.0).unsqueeze(1)
            rounded.copy_(torch.div(numbers, divisors).round_())
        self.write(integers, place)

    @override
    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        integers = self.read(place, values.numel())
        for numbers, units, rounded in self._in_rows(values, scales, integers):
            torch.mul(rounded, units.unsqueeze(1), out=numbers)

    @abstractmethod
    def integer_bytes(self, numel: int) -> int:
        """Return the bytes of so many integers."""

    @abstractmethod
    def write(self, integers: Tensor, place: Tensor) -> None:
        """Write integers, int8, as bytes, uint8."""

    @abstractmethod
    def read(self, place: Tensor, numel: int) -> Tensor:
        """Return so many integers, int8, that bytes stand for."""

    def _count(self, numel: int) -> int:
        return -(-numel // self.config.block)

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the scales and the bytes of the integers."""
        edge = _SCALE_BYTES * self._count(numel)
        return message[:edge].view(torch.float32), message[edge:]

    def _in_rows(
        self, values: Tensor, scales: Tensor, integers: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield all whole blocks, each a row, and then the last block if that is shorter."""
        block = self.config.block
        whole = values.numel() // block
        edge = whole * block
        if whole:
            rows = (whole, block)
            yield values[:edge].view(rows), scales[:whole], integers[:edge].view(rows)
        if edge < values.numel():
            yield values[None, edge:], scales[whole:], integers[None, edge:]


class Int8(Blocks):
    """Integers of 8 bits."""

    summary: ClassVar[str] = "blocks of 8-bit integers with a scale: a quarter of the bytes of fp32"
    steps: ClassVar[int] = 127

    @override
    def integer_bytes(self, numel: int) -> int:
        return numel

    @override
    def write(self, integers: Tensor, place: Tensor) -> None:
        place.view(torch.int8).copy_(integers)

    @override
    def read(self, place: Tensor, numel: int) -> Tensor:
        return place.view(torch.int8)


class Int4(Blocks):
    """Integers of 4 bits, two in a byte: the first half of the numbers in the lower bits."""

    summary: ClassVar[str] = "blocks of 4-bit integers with a scale: an eighth of the bytes of fp32"
    parameters: ClassVar[bool] = False  # nobody has shown training with such values
    steps: ClassVar[int] = 7

    @override
    def integer_bytes(self, numel: int) -> int:
        return -(-numel // 2)

    @override
    def write(self, integers: Tensor, place: Tensor) -> None:
        middle = place.numel()
        place.copy_(integers[:middle].add(_ZERO))
        place[: integers.numel() - middle].add_(integers[middle:].add(_ZERO).view(torch.uint8) << 4)

    @override
    def read(self, place: Tensor, numel: int) -> Tensor:
        both = torch.cat([place & _LOWER_BITS, place >> 4])
        return both[:numel].view(torch.int8).sub_(_ZERO)
