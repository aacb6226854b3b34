"""The contract of a store, the second extension point: where tensors live between uses."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class TensorStore(Protocol):
    """Where a shard lives between uses: on the device, in host memory, on disk."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors that ``fetch`` returns."""

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor's values under a key, replacing what was there."""

    def fetch(self, key: str) -> Tensor:
        """Return the tensor of a key; raises KeyError when it was never put."""

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start bringing tensors that will be fetched soon."""

    def flush(self) -> None:
        """Return when everything put so far is safely kept."""

    def close(self) -> None:
        """Release memory and files; the store cannot be used afterwards."""
