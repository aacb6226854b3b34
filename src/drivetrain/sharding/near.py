"""The values of a unit that few neighbors hold together between forward and backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drivetrain.collectives import Communicator, Handle


class NearPart:
    """One rank's part of a unit's values that its neighbors hold together.

    Args:
        values: the flat tensors, each 1-D; this rank's part of each is copied.
        neighbors: the ranks that hold a part each.
    """

    def __init__(self, values: Sequence[Tensor], neighbors: Communicator) -> None:
        self._neighbors = neighbors
        self._parts = [
            [flat[slice(*neighbors.chunk(flat.numel())[rank])] for flat in values]
            for rank in range(neighbors.size)
        ]
        self._kept = [part.clone() for part in self._parts[neighbors.rank]]

    def restore(self, label: str) -> Handle:
        """Start to bring all values back into the flat tensors."""
        with torch.no_grad():
            torch._foreach_copy_(self._parts[self._neighbors.rank], self._kept)
        return self._neighbors.gather_parts(self._parts, label=label)
