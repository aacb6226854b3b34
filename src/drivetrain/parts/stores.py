"""The store that keeps tensors where they are: the baseline that other stores are held to."""

from collections.abc import Iterable

import torch
from torch import Tensor


class DeviceStore:
    """Keeps tensors on one device.

    Args:
        device: where the tensors live; a tensor put from elsewhere is copied there.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._tensors: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """The device of the tensors that ``fetch`` returns."""
        return self._device

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a copy of a tensor under a key, in the storage that the key already has."""
        kept = self._tensors.get(key)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            kept.copy_(tensor)
        else:
            self._tensors[key] = tensor.detach().to(self._device, copy=True)

    def fetch(self, key: str) -> Tensor:
        """Return the kept tensor itself; raises KeyError when it was never put."""
        return self._tensors[key]

    def prefetch(self, keys: Iterable[str]) -> None:
        """Check that the keys are there: nothing has to move."""
        for key in keys:
            self.fetch(key)

    def flush(self) -> None:
        """Wait for copies to the device that are still under way."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def close(self) -> None:
        """Drop every tensor."""
        self._tensors.clear()
