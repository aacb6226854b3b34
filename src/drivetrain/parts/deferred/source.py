"""Where the values of a model come from that was built on the meta device."""

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Knows the values of parameters and buffers that so far have a shape and a dtype only."""

    def value(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole values of a parameter or buffer of a model that was built on meta.

        Args:
            name: its name in the user's model.
            tensor: the parameter or buffer, on the meta device.

        Returns:
            Fresh memory on the CPU, of the tensor's shape and dtype.

        Raises:
            UsageError: nothing is known about the tensor.
            CheckpointError: a file has no such values, or they do not fit.
        """
