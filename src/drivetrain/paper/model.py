"""The model of a plan: anything that can list its units for a micro-batch."""

from collections.abc import Sequence
from typing import Protocol

from drivetrain.paper.work import PaperUnit, Recompute


class PaperModel(Protocol):
    """A model on paper: sizes alone, or a module that was looked at."""

    @property
    def layers(self) -> int:
        """Number of repeated blocks, between which a pipeline may be cut."""
        ...

    @property
    def heads(self) -> int:
        """Heads of attention that tensor parallelism divides; 0 without attention."""
        ...

    @property
    def seq(self) -> int:
        """Tokens of a sample; 1 where a sample is no sequence."""
        ...

    @property
    def parameters(self) -> int:
        """Number of distinct parameters."""
        ...

    def model_flops(self, batch: int) -> float:
        """Return the operations of a step on a batch of samples, without recomputation."""
        ...

    def units(
        self, micro_batch: int, recompute: Recompute, *, fused: bool, width: int = 2
    ) -> Sequence[PaperUnit]:
        """Return the units in the order of forward; equal ones are the same object.

        Args:
            micro_batch: samples.
            recompute: what blocks compute again in backward.
            fused: whether attention is one kernel that keeps no scores.
            width: bytes of a number.
        """
        ...
