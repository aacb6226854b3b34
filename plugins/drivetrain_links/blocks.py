"""Blocks of integers with a scale each: a quarter or an eighth of the bytes of fp32.

A block of B numbers x becomes a scale s = max|x| / q and integers round(x / s) of -q to q, with q
= 127 for 8 bits and q = 7 for 4. The error of a number is at most s / 2, or s if chance rounds::

    | scales, fp32: one per block | integers: one per number, or two in a byte |

Blocks and their all-to-all are those of Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", 2023 (arXiv 2306.10209), sections 3.1 and 3.3. It keeps no
errors; here gradients have error feedback, with which rounding to the nearest needs no chance
(Karimireddy et al., ICML 2019, theorem II: any contraction converges at the rate of SGD). Updates
of parameters have it, too (``drivetrain.links.encoded``); that training goes on as well with
rounded values of parameters is what experiments of the ZeRO++ paper found.

With ``rounding: stochastic`` a gradient is rounded up with a chance of the share of s that is above
the lower integer: then its mean is the gradient, and SGD converges without any error that is kept
(Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017, section 3). With feedback, chance must still be a contraction. The mean square of the
error of a number x is at most x^2 + s^2 / 8, as for |x| = s / 4, and the largest number of a block,
q s, has no error. So all B errors together are smaller than the block as long as B - 1 < 8 q^2: for
all blocks of 8 bits, and for 4 bits up to B = 392. For larger ones there is no proof.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.config.option import option
from drivetrain.errors import ConfigError
from drivetrain.links.codec import Codec, rows_in_caches
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
    rounding: Literal["nearest", "stochastic"] = option(
        "nearest",
        help="how gradients are rounded: to the nearest integer, or by chance to one of both "
        "neighbors, so that the mean is right",
    )
    feedback: bool = option(
        True,
        help="whether errors of gradients are kept for the next step; false only with rounding: "
        "stochastic",
    )

    def __post_init__(self) -> None:
        if not self.feedback and self.rounding == "nearest":
            raise ConfigError(
                "expected links.far.options.feedback: true with rounding: nearest, found false: "
                "errors that nobody keeps would push all steps the same way; take rounding: "
                "stochastic, or leave feedback out"
            )


class Blocks(Codec[BlockOptions]):
    """Blocks of numbers with a scale each; a subclass says how integers become bytes.

    Attributes:
        steps: the largest integer.
    """

    honesty: ClassVar[Honesty] = Honesty.THEORY
    Config: ClassVar[type] = BlockOptions
    steps: ClassVar[int]

    def __init__(self, config: BlockOptions) -> None:
        super().__init__(config)
        self.keeps_feedback = config.feedback
        self.draws = config.rounding == "stochastic"

    @override
    def honesty_of(self, use: str) -> Honesty:
        if use == "parameters":
            return Honesty.EMPIRICAL
        fed_back = use == "gradients" and self.draws and self.keeps_feedback
        proved = not fed_back or self.config.block <= 8 * self.steps**2
        return self.honesty if proved else Honesty.EMPIRICAL

    @override
    def nbytes(self, numel: int) -> int:
        return _SCALE_BYTES * self._count(numel) + self.integer_bytes(numel)

    @override
    def encode(self, values: Tensor, message: Tensor) -> None:
        self._encode(values, message, torch.round_)

    @override
    def encode_gradients(self, values: Tensor, message: Tensor, seed: int) -> None:
        if not self.draws:
            self.encode(values, message)
            return
        generator = torch.Generator(values.device).manual_seed(seed)
        self._encode(values, message, partial(self._round_by_chance, generator=generator))

    def _round_by_chance(self, scaled: Tensor, generator: torch.Generator) -> Tensor:
        """Return one of the two neighboring integers of each number; the mean is the number."""
        lower = scaled.floor()
        share = scaled.sub_(lower)  # exact, so that no draw rounds up too often
        drawn = torch.rand(scaled.shape, generator=generator, device=scaled.device)
        # The largest number of a block is an integer but for a rounding of its division.
        return lower.add_(drawn < share).clamp_(-self.steps, self.steps)

    def _encode(
        self, values: Tensor, message: Tensor, rounded_from: Callable[[Tensor], Tensor]
    ) -> None:
        scales, place = self._parts(message, values.numel())
        integers = torch.empty(values.numel(), dtype=torch.int8, device=values.device)
        for numbers, units, rounded in self._in_rows(values, scales, integers):
            # Unlike a norm, an absolute value and a maximum are vectorized on the CPU.
            scaled = numbers.abs()
            torch.amax(scaled, dim=1, out=units).div_(self.steps)
            # A block of zeros has the scale 0: any other divisor gives its zeros back.
            divisors = units.masked_fill(units == 0, 1.0).unsqueeze(1)
            rounded.copy_(rounded_from(torch.div(numbers, divisors, out=scaled)))
        self.write(integers, place)

    @override
    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        integers = self.read(place, values.numel())
        for numbers, units, rounded in self._in_rows(values, scales, integers):
            # A product of two dtypes would be slower.
            numbers.copy_(rounded).mul_(units.unsqueeze(1))

    @abstractmethod
    def integer_bytes(self, numel: int) -> int:
        """Return the bytes of so many integers."""

    @abstractmethod
    def write(self, integers: Tensor, place: Tensor) -> None:
        """Write integers, int8, as bytes, uint8; the integers may be changed."""

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
        """Yield whole blocks, each a row, piece by piece, and then a shorter last block."""
        block = self.config.block
        whole = values.numel() // block
        edge = whole * block
        numbers, rounded = values[:edge].view(-1, block), integers[:edge].view(-1, block)
        for some in rows_in_caches(whole, block, values.device):
            yield numbers[some], scales[some], rounded[some]
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
        lower, upper = integers.add_(_ZERO).view(torch.uint8).tensor_split([place.numel()])
        place.copy_(lower)
        place[: upper.numel()].bitwise_or_(upper.bitwise_left_shift_(4))

    @override
    def read(self, place: Tensor, numel: int) -> Tensor:
        both = place.new_empty(2, place.numel())
        torch.bitwise_and(place, _LOWER_BITS, out=both[0])
        torch.bitwise_right_shift(place, 4, out=both[1])
        return both.view(-1)[:numel].view(torch.int8).sub_(_ZERO)
