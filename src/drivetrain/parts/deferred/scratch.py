"""Memory for results that nobody keeps: the same each time, so that the heap does not crumble.

A large block from the heap that is freed and taken again, with small ones that stay in between,
leaves holes: the process would grow to the size of the model that it must not hold.
"""

import torch
from torch import Tensor


class Scratch:
    """One growing block of memory per device."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, torch.UntypedStorage] = {}

    def like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return memory of a tensor's shape, strides and dtype, valid until the next call."""
        extents = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in extents) if tensor.numel() else 0
        size = count * tensor.element_size()
        block = self._blocks.pop(device, None)
        if block is None or block.nbytes() < size:
            del block  # before the larger one is there
            block = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        self._blocks[device] = block
        plain = torch.empty(0, dtype=tensor.dtype, device=device)
        return plain.set_(block, 0, tensor.shape, tensor.stride())

    def close(self) -> None:
        """Give the memory back."""
        self._blocks.clear()
