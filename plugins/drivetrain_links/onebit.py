"""The sign of each number, and one scale per block: a 28th of the bytes of fp32.

A block of B numbers x becomes a scale a = mean |x| and the signs of the numbers, zero counting as
positive; each number comes back as a or -a::

    | scales, fp32: one per block | signs: eight in a byte |

Of all scales this one has the least error: |x|^2 - (sum |x|)^2 / B for the whole block, so sending
a block is always better than sending nothing. Only with error feedback do signs converge at the
rate of SGD: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", ICML 2019, algorithm 1 and theorem II; summed in two phases as Tang et al.,
"DoubleSqueeze", ICML 2019. 1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888) sends momenta by
such a code. A strategy decides whether gradients or momenta cross.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.config.option import option
from drivetrain.links.codec import Codec
from drivetrain.links.compressor import Honesty

_SCALE_BYTES, _BITS = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class OneBitOptions:
    """Options of ``onebit``."""

    block: int = option(
        256, help="numbers that share a scale; fewer are more exact", minimum=16, maximum=65536
    )


class OneBit(Codec[OneBitOptions]):
    """Signs with a scale for each block."""

    summary: ClassVar[str] = "the sign of each number, a scale per block: a 28th of the bytes"
    honesty: ClassVar[Honesty] = Honesty.THEORY
    parameters: ClassVar[bool] = False  # of values, little but the sign would be left
    keeps_feedback = True
    Config: ClassVar[type] = OneBitOptions

    @override
    def nbytes(self, numel: int) -> int:
        return self._scale_bytes(numel) - (-numel // _BITS)

    @override
    def encode(self, values: Tensor, message: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        for rows, means in self._in_rows(values, scales):
            torch.linalg.vector_norm(rows, 1, dim=1, out=means)
            means.div_(rows.shape[1])
        positive = torch.ge(values, 0).view(torch.uint8)
        place.zero_()
        for bit, signs in _by_bit(positive, place.numel()):
            place[: signs.numel()].bitwise_or_(signs << bit)

    @override
    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        for bit, numbers in _by_bit(values, place.numel()):
            signs = place[: numbers.numel()].bitwise_right_shift(bit).bitwise_and_(1)
            numbers.copy_(signs).mul_(2).sub_(1)
        for rows, means in self._in_rows(values, scales):
            rows.mul_(means.unsqueeze(1))

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.config.block) * _SCALE_BYTES

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the scales, and the bytes of signs: the first numbers have the lowest bits."""
        edge = self._scale_bytes(numel)
        return message[:edge].view(torch.float32), message[edge:]

    def _in_rows(self, values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all whole blocks, each a row, and then the last block if that is shorter."""
        block = self.config.block
        whole = values.numel() // block
        edge = whole * block
        if whole:
            yield values[:edge].view(whole, block), scales[:whole]
        if edge < values.numel():
            yield values[None, edge:], scales[whole:]


def _by_bit(values: Tensor, nbytes: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each bit, and the numbers whose signs have that place in the bytes."""
    for bit in range(_BITS):
        yield bit, values[bit * nbytes : (bit + 1) * nbytes]
