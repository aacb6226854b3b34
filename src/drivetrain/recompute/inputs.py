"""Where the inputs of recomputed blocks wait for backward: in place, on the host, or in parts.

In parts is ZeRO-R's Pa: on an axis whose ranks hold replicas of an input, each rank keeps its chunk
of the bytes, and recomputation gathers the whole. Backward reaches the blocks in the same order on
every rank, and so the collectives.
"""

import functools
import weakref
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from drivetrain.collectives import Communicator
from drivetrain.recompute.host import CopyWindow, HostCopy, KeptTensor, Lanes, OffloadedInputs
from drivetrain.shards import is_dense

Place: TypeAlias = Literal["device", "cpu"]

SMALL_NBYTES = 4096
"""Smaller tensors stay where they are: moving them costs more than they take."""

_Shared: TypeAlias = tuple[int, weakref.ReferenceType[KeptTensor]]  # the version that was kept


class KeptInputs:
    """Keeps the input tensors of blocks until their recomputation.

    An input that several blocks share, such as a mask, is kept once. Parameters, tensors of less
    than ``SMALL_NBYTES``, and views with gaps stay as they are.

    Args:
        place: ``cpu`` copies inputs of an accelerator to pinned host memory and back, while the
            accelerator computes; inputs of a CPU stay where they are.
        communicator: of the axis over which each input is split; None keeps it whole. Its ranks
            must hold equal inputs.
    """

    def __init__(self, place: Place = "device", communicator: Communicator | None = None) -> None:
        self.place = place
        alone = communicator is None or communicator.size == 1
        self._communicator = None if alone else communicator
        self._shared: MutableMapping[Tensor, _Shared] = WeakTensorKeyDictionary()
        self._lanes: dict[torch.device, Lanes] = {}
        self._leaving = CopyWindow(OffloadedInputs.leave_device)
        self._coming = CopyWindow(OffloadedInputs.cancel)
        self._last: weakref.ReferenceType[OffloadedInputs] | None = None

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context in which a block saves its inputs."""
        if self.place == "device" and self._communicator is None:
            return nullcontext()
        previous = None if self._last is None else self._last()
        call = OffloadedInputs(previous, self._coming)
        return saved_tensors_hooks(functools.partial(self._save, call), _bring_back)

    def _save(self, call: OffloadedInputs, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if not self._moves(tensor):
            return tensor
        if call.is_empty:
            self._leaving.admit(call)  # first: what left before makes room
            self._last = weakref.ref(call)
        kept = self._put_away(tensor)
        call.add(kept)
        return functools.partial(call.whole, kept)

    def _put_away(self, tensor: Tensor) -> KeptTensor:
        entry = self._shared.get(tensor)
        kept = None if entry is None or entry[0] != tensor._version else entry[1]()
        if kept is None:
            kept = self._keep(tensor.detach())
            self._shared[tensor] = (tensor._version, weakref.ref(kept))
        return kept

    def _moves(self, tensor: Tensor) -> bool:
        return (
            (self._leaves(tensor) or self._communicator is not None)
            and type(tensor) is Tensor
            and tensor.layout is torch.strided
            and not (tensor.is_leaf and tensor.requires_grad)
            and tensor.nbytes >= SMALL_NBYTES
            and is_dense(tensor)
        )

    def _leaves(self, tensor: Tensor) -> bool:
        """Whether a tensor waits in another memory than its own."""
        return self.place == "cpu" and tensor.device.type != "cpu"

    def _keep(self, tensor: Tensor) -> KeptTensor:
        lanes = self._lanes_of(tensor.device) if self._leaves(tensor) else None
        if self._communicator is not None:
            return _Part(tensor, self._communicator, lanes)
        return HostCopy(tensor, lanes or self._lanes_of(tensor.device))

    def _lanes_of(self, device: torch.device) -> Lanes:
        if device not in self._lanes:
            self._lanes[device] = Lanes(device)
        return self._lanes[device]


def _bring_back(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()


class _Part(KeptTensor):
    """This rank's chunk of a tensor's bytes.

    Args:
        tensor: dense, equal on all ranks of the axis.
        communicator: of the axis.
        lanes: the way of the chunk to host memory; None keeps the chunk on its device.
    """

    def __init__(self, tensor: Tensor, communicator: Communicator, lanes: Lanes | None) -> None:
        self._size, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._communicator = communicator
        flat = _bytes_of(tensor)
        self._start, self._stop = communicator.chunk(flat.numel())[communicator.rank]
        mine = flat[self._start : self._stop]
        self._mine = KeptTensor(mine.clone()) if lanes is None else HostCopy(mine, lanes)

    @override
    def leave_device(self) -> None:
        self._mine.leave_device()

    @override
    def start(self) -> None:
        self._mine.start()

    @override
    def cancel(self) -> None:
        self._mine.cancel()

    @override
    def whole(self) -> Tensor:
        """Return the values, gathered from the ranks of the axis."""
        tensor = torch.empty_strided(
            self._size, self._stride, dtype=self._dtype, device=self._device
        )
        flat = _bytes_of(tensor)
        flat[self._start : self._stop].copy_(self._mine.whole())
        self._communicator.all_gather(flat, label="input of a recomputed block").wait()
        return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as a 1-D uint8 view."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
