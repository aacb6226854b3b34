"""What is known of each parameter of the user's model: how the ranks of a cell hold it."""

from dataclasses import dataclass

from drivetrain_megatron.tensor.partition import Partition


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """How a parameter lies on the tensor-parallel axis.

    Attributes:
        shape: the global shape, as the user's model has it.
        partition: which part each rank of the axis holds; None if all hold the whole.
        partial: whether each rank's gradient is a part of a sum over the axis.
    """

    shape: tuple[int, ...]
    partition: Partition | None = None
    partial: bool = False

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what one rank of the axis holds."""
        if self.partition is None:
            return self.shape
        sizes = list(self.shape)
        sizes[self.partition.dim] = self.partition.local_size(rank)
        return tuple(sizes)

    def saves(self, rank: int) -> bool:
        """Whether this rank of the axis is the one that saves what it holds."""
        first = 0 if self.partition is None else self.partition.first_holder(rank)
        return rank == first
