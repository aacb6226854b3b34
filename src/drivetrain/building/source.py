"""Where the values of a model come from that was built on the meta device."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Ranges(NamedTuple):
    """Some half-open ranges of one dim of a tensor, one after the other.

    Attributes:
        dim: which one; negative ones count from the end.
        ranges: (start, stop) of each.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of what the ranges have of a whole tensor."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(pieces or [whole.narrow(self.dim, 0, 0)], self.dim)


class WeightSource(Protocol):
    """Knows the values of parameters and buffers that so far have a shape and a dtype only."""

    def value(self, name: str, tensor: Tensor, only: Ranges | None = None) -> Tensor:
        """Return the values of a parameter or buffer of a model that was built on meta.

        Args:
            name: its name in the user's model.
            tensor: the parameter or buffer, on the meta device, whole.
            only: the part that is wanted; from a file nothing else is read.

        Returns:
            Fresh memory on the CPU, of the tensor's dtype, and of its shape or the part's.

        Raises:
            UsageError: nothing is known about the tensor.
            CheckpointError: a file has no such values, or they do not fit.
        """
