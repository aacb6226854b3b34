"""Numbers rounded to bfloat16: half the bytes, and the range of fp32.

The rounding is that of Micikevicius et al., "Mixed Precision Training", ICLR 2018, and Kalamkar et
al., "A Study of BFLOAT16 for Deep Learning Training", 2019 (arXiv 1905.12322). A ring that adds in
bfloat16 rounds at every hop; here a number is rounded once on its way to the sum, which is fp32,
and once on its way back.
"""

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives.stretch import ParameterSpan
from drivetrain.links.codec import Codec
from drivetrain.links.compressor import Honesty, NoMethodOptions

_BYTES = 2


class Bf16(Codec[NoMethodOptions]):
    """Numbers in bfloat16."""

    summary: ClassVar[str] = "each number rounded to bfloat16: half the bytes of fp32"
    honesty: ClassVar[Honesty] = Honesty.ROUNDING
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
