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

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.config.option import option
from drivetrain.links.codec import Codec, rows_in_caches
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
        for numbers, scales, place in self._in_pieces(values, message):
            for rows, means in self._in_rows(numbers, scales):
                torch.mean(rows.abs(), 1, out=means)
            _pack_signs(numbers, place)

    @override
    def decode(self, message: Tensor, values: Tensor) -> None:
        for numbers, scales, place in self._in_pieces(values, message):
            numbers.copy_(_unpacked(place, numbers.numel())).mul_(2).sub_(1)
            for rows, means in self._in_rows(numbers, scales):
                rows.mul_(means.unsqueeze(1))

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.config.block) * _SCALE_BYTES

    def _in_pieces(
        self, values: Tensor, message: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield some blocks of numbers, their scales, and the bytes of their signs.

        A piece has a multiple of 8 blocks, so that its signs fill whole bytes.
        """
        edge = self._scale_bytes(values.numel())
        scales, place = message[:edge].view(torch.float32), message[edge:]
        group = _BITS * self.config.block
        for groups in rows_in_caches(-(-values.numel() // group), group, values.device):
            numbers = values[groups.start * group : groups.stop * group]
            yield (
                numbers,
                scales[groups.start * _BITS : groups.stop * _BITS],
                place[groups.start * self.config.block : groups.stop * self.config.block],
            )

    def _in_rows(self, values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all whole blocks, each a row, and then the last block if that is shorter."""
        block = self.config.block
        whole = values.numel() // block
        edge = whole * block
        if whole:
            yield values[:edge].view(whole, block), scales[:whole]
        if edge < values.numel():
            yield values[None, edge:], scales[whole:]


def _pack_signs(numbers: Tensor, place: Tensor) -> None:
    """Set the bits of numbers that are not negative, the first one the lowest of the first byte."""
    if numbers.device.type == "cpu":  # numpy compares and packs several times as fast as torch
        signs = np.greater_equal(numbers.numpy(), 0)
        place.copy_(torch.from_numpy(np.packbits(signs, bitorder="little")))
        return
    filled = torch.zeros(place.numel() * _BITS, dtype=torch.uint8, device=numbers.device)
    filled[: numbers.numel()] = numbers >= 0
    weights = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=numbers.device)
    torch.sum(filled.view(-1, _BITS) * weights, 1, dtype=torch.uint8, out=place)


def _unpacked(place: Tensor, numel: int) -> Tensor:
    """Return the bits of bytes as numbers of 0 and 1."""
    if place.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(place.numpy(), count=numel, bitorder="little"))
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=place.device)
    return place[:, None].bitwise_right_shift(shifts).bitwise_and_(1).view(-1)[:numel]
