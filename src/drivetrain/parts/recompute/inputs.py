"""Where the inputs of recomputed blocks wait for backward: in place, on the host, or in parts.

In parts is ZeRO-R's Pa: on an axis whose ranks hold replicas of an input, each rank keeps its chunk
of the bytes, and recomputation gathers the whole. Backward reaches the blocks in the same order on
every rank, and so the collectives.
"""

import weakref
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from drivetrain.parts.buckets import is_dense
from drivetrain.parts.collectives import Communicator

Place: TypeAlias = Literal["device", "cpu"]

SMALL_NBYTES = 4096
"""Smaller tensors stay where they are: moving them costs more than they take."""


class Waiting(Protocol):
    """A tensor's values, kept somewhere."""

    def whole(self) -> Tensor:
        """Return the tensor on its device."""


_Shared: TypeAlias = tuple[int, weakref.ReferenceType[Waiting]]  # the version that was kept


class Inputs:
    """Keeps the input tensors of blocks until their recomputation.

    An input that several blocks share, such as a mask, is kept once. Parameters, tensors of less
    than ``SMALL_NBYTES``, and views with gaps stay as they are.

    Args:
        place: ``cpu`` copies inputs to host memory, asynchronously from pinned memory on an
            accelerator; on a CPU that is where they are already, so they stay.
        communicator: of the axis over which each input is split; None keeps it whole. Its ranks
            must hold equal inputs.
    """

    def __init__(self, place: Place = "device", communicator: Communicator | None = None) -> None:
        self.place = place
        alone = communicator is None or communicator.size == 1
        self._communicator = None if alone else communicator
        self._shared: MutableMapping[Tensor, _Shared] = WeakTensorKeyDictionary()

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context in which a block saves its inputs."""
        if self.place == "device" and self._communicator is None:
            return nullcontext()
        return saved_tensors_hooks(self._put_away, _bring_back)

    def _put_away(self, tensor: Tensor) -> Tensor | Waiting:
        if not self._moves(tensor):
            return tensor
        entry = self._shared.get(tensor)
        kept = None if entry is None or entry[0] != tensor._version else entry[1]()
        if kept is None:
            kept = self._keep(tensor.detach())
            self._shared[tensor] = (tensor._version, weakref.ref(kept))
        return kept

    def _moves(self, tensor: Tensor) -> bool:
        off_device = self.place == "cpu" and tensor.device.type != "cpu"
        return (
            (off_device or self._communicator is not None)
            and type(tensor) is Tensor
            and tensor.layout is torch.strided
            and not (tensor.is_leaf and tensor.requires_grad)
            and tensor.nbytes >= SMALL_NBYTES
            and is_dense(tensor)
        )

    def _keep(self, tensor: Tensor) -> Waiting:
        on_host = self.place == "cpu" and tensor.device.type != "cpu"
        if self._communicator is not None:
            return _Part(tensor, self._communicator, on_host=on_host)
        return _HostCopy(tensor)


def _bring_back(kept: Tensor | Waiting) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.whole()


class _HostCopy:
    """A copy in pinned host memory, made beside what the device computes.

    Args:
        tensor: dense, on an accelerator.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        current = torch.accelerator.current_stream(tensor.device)
        beside = torch.Stream(tensor.device)
        beside.wait_stream(current)
        with beside:
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(beside)
        self._copied = beside.record_event()

    def whole(self) -> Tensor:
        """Return the values on the device."""
        torch.accelerator.current_stream(self._device).wait_event(self._copied)
        return self._host.to(self._device, non_blocking=True)


class _Part:
    """This rank's chunk of a tensor's bytes.

    Args:
        tensor: dense, equal on all ranks of the axis.
        communicator: of the axis.
        on_host: whether the chunk waits on the host.
    """

    def __init__(self, tensor: Tensor, communicator: Communicator, *, on_host: bool) -> None:
        self._size, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._communicator = communicator
        flat = _bytes_of(tensor)
        self._start, self._stop = communicator.chunk(flat.numel())[communicator.rank]
        mine = flat[self._start : self._stop]
        self._mine: Tensor | Waiting = _HostCopy(mine) if on_host else mine.clone()

    def whole(self) -> Tensor:
        """Return the values, gathered from the ranks of the axis."""
        tensor = torch.empty_strided(
            self._size, self._stride, dtype=self._dtype, device=self._device
        )
        flat = _bytes_of(tensor)
        flat[self._start : self._stop].copy_(_bring_back(self._mine))
        self._communicator.all_gather(flat, label="input of a recomputed block").wait()
        return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as a 1-D uint8 view."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
