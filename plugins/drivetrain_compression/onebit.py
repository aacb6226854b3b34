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

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.compression.compressor import Fidelity
from drivetrain_compression.blocks import Scaled, ScaleOptions
from drivetrain_compression.compiled import Format

_BITS = 8

_SIGNS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(1),
    np.float32(-1),
)
"""The signs that each byte stands for, (256, 8)."""


class OneBit(Scaled[ScaleOptions]):
    """Signs with a scale for each block."""

    summary: ClassVar[str] = "the sign of each number, a scale per block: a 28th of the bytes"
    fidelity: ClassVar[Fidelity] = Fidelity.THEORY
    parameters: ClassVar[bool] = False  # of values, little but the sign would be left
    keeps_feedback = True
    Config: ClassVar[type] = ScaleOptions
    bits: ClassVar[int] = 1
    form: ClassVar[Format] = Format.ONEBIT

    @override
    def encode_by_torch(self, values: Tensor, message: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        for rows, means, _ in self._in_rows(values, scales, values):
            torch.mean(rows.abs(), 1, out=means)
        _pack_signs(values, place)

    @override
    def decode_by_torch(self, message: Tensor, values: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        _unpack_signs(place, values)
        for rows, means, _ in self._in_rows(values, scales, values):
            rows.mul_(means.unsqueeze(1))


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


def _unpack_signs(place: Tensor, values: Tensor) -> None:
    """Write the signs that bytes stand for as numbers of 1 and -1."""
    if place.device.type == "cpu":
        whole = values.numel() // _BITS
        edge = whole * _BITS
        # Without a check of indices, numpy writes into the tensor itself.
        np.take(_SIGNS, place[:whole].numpy(), 0, values[:edge].view(whole, _BITS).numpy(), "clip")
        last = torch.from_numpy(_SIGNS[place[whole:].numpy()])
        values[edge:] = last.view(-1)[: values.numel() - edge]
        return
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=place.device)
    bits = place[:, None].bitwise_right_shift(shifts).bitwise_and_(1)
    values.copy_(bits.view(-1)[: values.numel()]).mul_(2).sub_(1)
