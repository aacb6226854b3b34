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

from drivetrain.compression.compressor import Honesty
from drivetrain.config.option import option
from drivetrain_compression.compiled import Compiled, CompiledOptions, Format

_SCALE_BYTES, _BITS = 4, 8

_GROUP_BLOCKS = 4 * _BITS
"""Blocks of any length whose signs fill a multiple of 4 bytes."""

_SIGNS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(1),
    np.float32(-1),
)
"""The signs that each byte stands for, (256, 8)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneBitOptions(CompiledOptions):
    """Options of ``onebit``."""

    block: int = option(
        256, help="numbers that share a scale; fewer are more exact", minimum=16, maximum=65536
    )


class OneBit(Compiled[OneBitOptions]):
    """Signs with a scale for each block."""

    summary: ClassVar[str] = "the sign of each number, a scale per block: a 28th of the bytes"
    honesty: ClassVar[Honesty] = Honesty.THEORY
    parameters: ClassVar[bool] = False  # of values, little but the sign would be left
    keeps_feedback = True
    Config: ClassVar[type] = OneBitOptions
    form: ClassVar[Format] = Format.ONEBIT

    @override
    def nbytes(self, numel: int) -> int:
        return self._scale_bytes(numel) - (-numel // _BITS)

    @property
    @override
    def group(self) -> int:
        return _GROUP_BLOCKS * self.config.block

    @property
    @override
    def figure(self) -> int:
        return self.config.block

    @override
    def encode_by_torch(self, values: Tensor, message: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        for rows, means in self._in_rows(values, scales):
            torch.mean(rows.abs(), 1, out=means)
        _pack_signs(values, place)

    @override
    def decode_by_torch(self, message: Tensor, values: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        _unpack_signs(place, values)
        for rows, means in self._in_rows(values, scales):
            rows.mul_(means.unsqueeze(1))

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.config.block) * _SCALE_BYTES

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the scales and the bytes of signs."""
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
