"""Methods that turn each tensor's numbers into bytes: casts, blocks of integers, a few of many."""

from abc import abstractmethod
from collections import Counter
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import Communicator, sent_bytes
from drivetrain.collectives.stretch import ParameterSpan, Stretch, StretchParts
from drivetrain.links.compressor import Compressor, FarGather, FarReduction, MethodConfigT
from drivetrain.links.encoded import EncodedGather, EncodedReduction, MessageLayout, SeedCounts
from drivetrain.runtime.mesh import Axis

SMALLEST = 2048
"""Elements of the smallest matrix that is encoded: smaller ones save nothing worth an error."""

_FP32 = 4


class Codec(Compressor[MethodConfigT]):
    """A method whose message for n numbers is a known number of bytes.

    Attributes:
        parameters: whether it can gather values of parameters.
        updates: whether it can gather updates of parameters: by default, as gradients.
        draws: whether gradients are rounded by chance; options may decide it.
    """

    parameters: ClassVar[bool] = True
    updates: ClassVar[bool] = True
    draws: bool = False

    @property
    @abstractmethod
    def group(self) -> int:
        """Numbers of the shortest range that can be encoded by itself."""

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many encoded elements."""

    # --- numbers and bytes: see ``drivetrain.links.encoded.Encoding`` ---

    @abstractmethod
    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write numbers as bytes."""

    def encode_gradients(
        self,
        values: Tensor,
        message: Tensor,
        *,
        errors: Tensor | None = None,
        draws: torch.Generator | None = None,
    ) -> None:
        """Write gradients as bytes: as all numbers, unless these are rounded by chance."""
        self.encode(values if errors is None else values + errors, message)

    @abstractmethod
    def decode(self, message: Tensor, values: Tensor) -> None:
        """Write the numbers that bytes stand for."""

    def add(self, message: Tensor, values: Tensor) -> None:
        """Add the numbers that bytes stand for."""
        found = torch.empty_like(values)
        self.decode(message, found)
        values.add_(found)

    def keep(self, values: Tensor, message: Tensor, errors: Tensor) -> None:
        """Keep the errors of the bytes."""
        found = torch.empty_like(values)
        self.decode(message, found)
        errors.add_(values).sub_(found)

    # --- sums and gathers of them ---

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
            self,
            far,
            stretches,
            everywhere=everywhere,
            feedback=self.keeps_feedback,
            draws=self.draws,
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
        layouts = [MessageLayout(self, each) for each in stretches]
        held = sum(SeedCounts.nbytes(layout.spans) for layout in layouts) if self.draws else 0
        if not self.keeps_feedback:
            return held
        numels = [layout.numel for layout in layouts]
        return held + _FP32 * (sum(numels) - (0 if everywhere else numels[far.rank]))

    @override
    def rehearse(self, matrix: Tensor) -> None:
        values = matrix.view(-1)
        span = ParameterSpan("", matrix.numel(), matrix.shape[1], 0, 0, matrix.numel())
        layout = MessageLayout(self, [Stretch(matrix.numel(), matrix.dtype, (span,))])
        message = layout.room(matrix.device)
        draws = torch.Generator(matrix.device).manual_seed(0) if self.draws else None
        errors = None
        for _, place, room in layout.pieces(matrix.device):
            numbers, bytes_ = values[place], message[room]
            if self.keeps_feedback and (errors is None or len(errors) != len(numbers)):
                errors = torch.zeros_like(numbers)
            self.encode_gradients(numbers, bytes_, errors=errors, draws=draws)
            if errors is not None:
                self.keep(numbers, bytes_, errors)
            self.add(bytes_, numbers)  # as if from another host
            self.decode(bytes_, numbers)  # the sum

    @override
    def gathering(self, far: Communicator, stretches: StretchParts, *, updates: bool) -> FarGather:
        return EncodedGather(self, far, stretches, updates=updates)

    @override
    def sent_gathering(self, far: Axis, stretches: StretchParts) -> Counter[tuple[str, str]]:
        lengths = [MessageLayout(self, each).nbytes for each in stretches]
        return Counter({(far.name, "all_gather"): sent_bytes("all_gather", lengths, far.rank)})
