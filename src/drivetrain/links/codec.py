"""Methods that turn each tensor's numbers into bytes: casts, blocks of integers, a few of many."""

from abc import abstractmethod
from collections import Counter
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import Communicator, sent_bytes
from drivetrain.collectives.stretch import ParameterSpan, StretchParts
from drivetrain.links.compressor import Compressor, FarGather, FarReduction, MethodConfigT
from drivetrain.links.encoded import EncodedGather, EncodedReduction
from drivetrain.links.message import MessageLayout
from drivetrain.runtime.mesh import Axis

SMALLEST = 2048
"""Elements of the smallest matrix that is encoded: smaller ones save nothing worth an error."""

_FP32 = 4


class Codec(Compressor[MethodConfigT]):
    """A method whose message for n numbers is a known number of bytes.

    Attributes:
        parameters: whether it can gather values of parameters.
        updates: whether it can gather updates of parameters: by default, as gradients.
    """

    parameters: ClassVar[bool] = True
    updates: ClassVar[bool] = True

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many encoded elements."""

    @abstractmethod
    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write numbers as bytes; see ``drivetrain.links.message.Encoding``."""

    @abstractmethod
    def decode(self, message: Tensor, values: Tensor) -> None:
        """Write the numbers that bytes stand for."""

    def encodes(self, span: ParameterSpan, dtype: torch.dtype) -> bool:
        """Return whether a parameter's elements are encoded: those of large matrices."""
        return dtype.is_floating_point and span.is_matrix and span.numel >= SMALLEST

    @override
    def approximates(self, stretches: StretchParts) -> bool:
        each = (stretch for part in stretches for stretch in part)
        return any(self.encodes(span, stretch.dtype) for stretch in each for span in stretch.spans)

    @override
    def reduction(
        self, far: Communicator, stretches: StretchParts, *, everywhere: bool
    ) -> FarReduction:
        return EncodedReduction(
            self, far, stretches, everywhere=everywhere, feedback=self.keeps_feedback
        )

    @override
    def sent(
        self, far: Axis, stretches: StretchParts, *, everywhere: bool
    ) -> Counter[tuple[str, str]]:
        lengths = [MessageLayout(self, each).nbytes for each in stretches]
        sent = Counter({(far.name, "all_to_all"): sent_bytes("all_to_all", lengths, far.rank)})
        if everywhere:
            sent[far.name, "all_gather"] = sent_bytes("all_gather", lengths, far.rank)
        return sent

    @override
    def held(self, far: Axis, stretches: StretchParts, *, everywhere: bool) -> int:
        if not self.keeps_feedback:
            return 0
        numels = [MessageLayout(self, each).numel for each in stretches]
        return _FP32 * (sum(numels) - (0 if everywhere else numels[far.rank]))

    @override
    def rehearse(self, matrix: Tensor) -> None:
        values = matrix.view(-1)
        message = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=matrix.device)
        self.encode(values, message)
        self.decode(message, values)  # for the error that is kept
        self.decode(message, values)  # of another host

    @override
    def gathering(self, far: Communicator, stretches: StretchParts, *, updates: bool) -> FarGather:
        return EncodedGather(self, far, stretches, updates=updates)

    @override
    def sent_gathering(self, far: Axis, stretches: StretchParts) -> Counter[tuple[str, str]]:
        lengths = [MessageLayout(self, each).nbytes for each in stretches]
        return Counter({(far.name, "all_gather"): sent_bytes("all_gather", lengths, far.rank)})
