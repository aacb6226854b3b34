"""Numbers in fewer bytes: blocks of integers with a scale each, or bfloat16.

A block of B numbers x becomes a scale s = max|x| / q and integers round(x / s) of -q to q, with q
= 127 for 8 bits and q = 7 for 4. The error of a number is at most s / 2, or s if chance rounds::

    | scales, fp32: one per block | integers: one per number, or two in a byte |

Blocks and their all-to-all are those of Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", 2023 (arXiv 2306.10209), sections 3.1 and 3.3. It keeps no
errors; here gradients have error feedback, with which rounding to the nearest needs no chance
(Karimireddy et al., ICML 2019, theorem II: any contraction converges at the rate of SGD). Updates
of parameters have it, too (``drivetrain.compression.compressor``); that training goes on as well
with rounded values of parameters is what experiments of the ZeRO++ paper found.

With ``rounding: stochastic`` a gradient is rounded up with a chance of the share of s that is above
the lower integer: then its mean is the gradient, and SGD converges without any error that is kept
(Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017, section 3). With feedback, chance must still be a contraction. The mean square of the
error of a number x is at most x^2 + s^2 / 8, as for |x| = s / 4, and the largest number of a block,
q s, has no error. So all B errors together are smaller than the block as long as B - 1 < 8 q^2: for
all blocks of 8 bits, and for 4 bits up to B = 392. For larger ones there is no proof.

Numbers rounded to bfloat16: half the bytes, and the range of fp32.

The rounding is that of Micikevicius et al., "Mixed Precision Training", ICLR 2018, and Kalamkar et
al., "A Study of BFLOAT16 for Deep Learning Training", 2019 (arXiv 1905.12322). A ring that adds in
bfloat16 rounds at every hop; here a number is rounded once on its way to the sum, which is fp32,
and once on its way back.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives.volume import ParameterSpan
from drivetrain.compression.compressor import Codec, Fidelity, NoMethodOptions
from drivetrain.config.option import option
from drivetrain.errors import ConfigError
from drivetrain_compression.compiled import Compiled, CompiledOptions, Format

# --- blocks of integers with a scale each ---

_SCALE_BYTES = 4

_GROUP_BLOCKS = 8
"""Blocks of any length whose integers, or eight signs each, fill bytes."""

_WORD_BITS = 32
"""Bits of the 4 bytes that a group fills."""

_UPPER = 16
"""Two 4-bit integers of -7 to 7 are a sum of one byte: the first, and 16 times the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleOptions(CompiledOptions):
    """Options of all blocks with a scale each, and all those of ``onebit``."""

    block: int = option(
        256, help="numbers that share a scale; fewer are more exact", minimum=16, maximum=65536
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions(ScaleOptions):
    """Options of ``int8`` and ``int4``."""

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


ScaleOptionsT = TypeVar("ScaleOptionsT", bound=ScaleOptions)


class Scaled(Compiled[ScaleOptionsT]):
    """Blocks of numbers of few bits, with a scale each.

    Attributes:
        bits: of a number.
    """

    bits: ClassVar[int]

    @override
    def nbytes(self, numel: int) -> int:
        return self._scale_bytes(numel) - (-numel * self.bits // 8)

    @property
    @override
    def group(self) -> int:
        return max(_GROUP_BLOCKS, _WORD_BITS // self.bits) * self.config.block

    @property
    @override
    def figure(self) -> int:
        return self.config.block

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.config.block) * _SCALE_BYTES

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the scales and the bytes of the numbers."""
        edge = self._scale_bytes(numel)
        return message[:edge].view(torch.float32), message[edge:]

    def _in_rows(
        self, values: Tensor, scales: Tensor, others: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield all whole blocks, each a row, and then the last block if that is shorter."""
        block = self.config.block
        whole = values.numel() // block
        edge = whole * block
        if whole:
            yield values[:edge].view(-1, block), scales[:whole], others[:edge].view(-1, block)
        if edge < values.numel():
            yield values[None, edge:], scales[whole:], others[None, edge:]


class Blocks(Scaled[BlockOptions]):
    """Blocks of numbers with a scale each; a subclass says how integers become bytes.

    Attributes:
        steps: the largest integer.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.THEORY
    Config: ClassVar[type] = BlockOptions
    steps: ClassVar[int]

    def __init__(self, config: BlockOptions) -> None:
        super().__init__(config)
        self.keeps_feedback = config.feedback
        self.draws = config.rounding == "stochastic"

    @override
    def fidelity_of(self, use: str) -> Fidelity:
        if use == "parameters":
            return Fidelity.EMPIRICAL
        fed_back = use == "gradients" and self.draws and self.keeps_feedback
        proved = not fed_back or self.config.block <= 8 * self.steps**2
        return self.fidelity if proved else Fidelity.EMPIRICAL

    @override
    def encode_by_torch(self, values: Tensor, message: Tensor) -> None:
        scaled, place = self._scaled(values, message)
        # A scale of few denormal steps is rounded much: quotients may be above all integers.
        self.write(scaled.round_().clamp_(-self.steps, self.steps), place)

    @override
    def encode_gradients(
        self,
        values: Tensor,
        message: Tensor,
        *,
        errors: Tensor | None = None,
        draws: torch.Generator | None = None,
    ) -> None:
        if draws is None or not self.draws:
            super().encode_gradients(values, message, errors=errors)
            return
        scaled, place = self._scaled(values if errors is None else values + errors, message)
        lower = scaled.floor()
        share = scaled.sub_(lower)  # exact, so that no draw rounds up too often
        drawn = torch.rand(scaled.shape, generator=draws, device=scaled.device)
        # The largest number of a block is an integer but for a rounding of its division.
        lower.add_(drawn < share).clamp_(-self.steps, self.steps)
        self.write(lower, place)

    def _scaled(self, values: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
        """Write the scales; return the scaled numbers, and the bytes for their integers."""
        scales, place = self._parts(message, values.numel())
        scaled = torch.empty_like(values)
        for numbers, units, quotients in self._in_rows(values, scales, scaled):
            # Unlike a norm, an absolute value and a maximum are vectorized on the CPU.
            torch.abs(numbers, out=quotients)
            torch.amax(quotients, dim=1, out=units).div_(self.steps)
            # A block of zeros has the scale 0: any other divisor gives its zeros back.
            divisors = units.masked_fill(units == 0, 1.0).unsqueeze(1)
            torch.div(numbers, divisors, out=quotients)
        return scaled, place

    @override
    def decode_by_torch(self, message: Tensor, values: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        self.read(place, values)
        for numbers, units, _ in self._in_rows(values, scales, values):
            numbers.mul_(units.unsqueeze(1))

    @abstractmethod
    def write(self, integers: Tensor, place: Tensor) -> None:
        """Write integers, fp32, as bytes, uint8; the integers may be changed."""

    @abstractmethod
    def read(self, place: Tensor, integers: Tensor) -> None:
        """Write the integers, fp32, that bytes stand for."""


class Int8(Blocks):
    """Integers of 8 bits."""

    summary: ClassVar[str] = "blocks of 8-bit integers with a scale: a quarter of the bytes of fp32"
    bits: ClassVar[int] = 8
    steps: ClassVar[int] = 127
    form: ClassVar[Format] = Format.INT8

    @override
    def write(self, integers: Tensor, place: Tensor) -> None:
        place.view(torch.int8).copy_(integers)

    @override
    def read(self, place: Tensor, integers: Tensor) -> None:
        integers.copy_(place.view(torch.int8))


class Int4(Blocks):
    """Integers of 4 bits, two in a byte: one of each half of the numbers."""

    summary: ClassVar[str] = "blocks of 4-bit integers with a scale: an eighth of the bytes of fp32"
    parameters: ClassVar[bool] = False  # nobody has shown training with such values
    bits: ClassVar[int] = 4
    steps: ClassVar[int] = 7
    form: ClassVar[Format] = Format.INT4

    @override
    def write(self, integers: Tensor, place: Tensor) -> None:
        lower, upper = integers.tensor_split([place.numel()])
        lower[: upper.numel()].add_(upper, alpha=_UPPER)
        place.view(torch.int8).copy_(lower)

    @override
    def read(self, place: Tensor, integers: Tensor) -> None:
        lower, upper = integers.tensor_split([place.numel()])
        bytes_ = place.view(torch.int8)
        lower.copy_(bytes_)
        # Lower ones are between -8 and 8, so the nearest multiple of 16 is the upper one's.
        upper.copy_(bytes_[: upper.numel()].add(_UPPER // 2).bitwise_right_shift_(4))
        lower[: upper.numel()].sub_(upper, alpha=_UPPER)


# --- numbers rounded to bfloat16 ---

_BYTES = 2


class Bf16(Codec[NoMethodOptions]):
    """Numbers in bfloat16."""

    summary: ClassVar[str] = "each number rounded to bfloat16: half the bytes of fp32"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING
    group = 2

    @override
    def encodes(self, span: ParameterSpan, dtype: torch.dtype) -> bool:
        return dtype.itemsize > _BYTES and super().encodes(span, dtype)

    @override
    def nbytes(self, numel: int) -> int:
        return _BYTES * numel

    @override
    def encode(self, values: Tensor, message: Tensor) -> None:
        message.view(torch.bfloat16).copy_(values)

    @override
    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message.view(torch.bfloat16))
