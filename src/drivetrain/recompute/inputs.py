"""Where the inputs of recomputed blocks wait for backward: in place, on the host, or in parts.

In parts is ZeRO-R's Pa: on an axis whose ranks hold replicas of an input, each rank keeps its chunk
of the bytes, and recomputation gathers the whole. Backward reaches the blocks in the same order on
every rank, and so the collectives.

Copies to host memory and back run on streams of their own, one for each direction. Inputs of at
most two calls of blocks are on their way at once, each way, which bounds the device memory that
copies take::

    forward of block   i       i+1     i+2            backward of block   i+1     i
    leaving            i-1, i  i, i+1  i+1, i+2       coming              i       i-1

When a third call begins, the compute stream waits for the oldest copies to leave: so it never waits
where copies are faster than blocks. The inputs that left last are still on the device when backward
begins.
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
from drivetrain.errors import UsageError
from drivetrain.shards import is_dense

Place: TypeAlias = Literal["device", "cpu"]

SMALL_NBYTES = 4096
"""Smaller tensors stay where they are: moving them costs more than they take."""

AT_ONCE = 2
"""Calls whose inputs may be on their way in one direction."""


class KeptTensor:
    """A tensor's values, kept for backward: here on their device; subclasses keep them elsewhere.

    Args:
        tensor: without history.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def leave_device(self) -> None:
        """Let go of the device's memory, in the order of the current stream."""

    def start(self) -> None:
        """Start to bring the values back; ``whole`` or ``cancel`` follows."""

    def cancel(self) -> None:
        """Let go of values that ``start`` brought back for nothing."""

    def whole(self) -> Tensor:
        """Return the tensor on its device."""
        return self._tensor


class Flight:
    """A copy that goes on while the device computes.

    Args:
        source: of the copy.
        target: of the copy; one of the two is on an accelerator, the other in pinned memory.
        beside: the stream of the copy.
    """

    def __init__(self, source: Tensor, target: Tensor, beside: torch.Stream) -> None:
        self._tensor: Tensor | None = source if target.device.type == "cpu" else target
        self._device, self._beside = self._tensor.device, beside
        beside.wait_stream(torch.accelerator.current_stream(self._device))
        with beside:
            target.copy_(source, non_blocking=True)
        self._over = beside.record_event()

    def land(self) -> None:
        """Let the current stream wait for the copy; its tensors may then be used, or freed."""
        torch.accelerator.current_stream(self._device).wait_event(self._over)
        self._tensor = None

    def __del__(self) -> None:
        """Keep the device's memory from being used again while the copy goes on."""
        if self._tensor is not None:
            self._tensor.record_stream(self._beside)


class Lanes:
    """The two streams on which inputs of one device travel.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)

    def leave(self, tensor: Tensor) -> tuple[Tensor, Flight]:
        """Start to copy a dense tensor to pinned host memory; return the copy."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host, Flight(tensor, host, self._out)

    def come(self, host: Tensor) -> tuple[Tensor, Flight]:
        """Start to copy a tensor from pinned host memory; return the copy."""
        tensor = torch.empty_like(host, device=self._device, pin_memory=False)
        return tensor, Flight(host, tensor, self._back)


class HostCopy(KeptTensor):
    """A copy in host memory.

    Args:
        tensor: dense, on an accelerator, without history.
        lanes: the streams of its device.
    """

    def __init__(self, tensor: Tensor, lanes: Lanes) -> None:
        self._lanes = lanes
        self._version = tensor._version
        self._torn = False
        self._host, flight = lanes.leave(tensor)
        self._leaving: tuple[Tensor, Flight] | None = (tensor, flight)
        self._coming: list[tuple[Tensor, Flight]] = []

    @override
    def leave_device(self) -> None:
        if self._leaving is not None:
            tensor, flight = self._leaving
            self._torn = tensor._version != self._version
            flight.land()
            self._leaving = None

    @override
    def start(self) -> None:
        if self._leaving is None:
            self._coming.append(self._lanes.come(self._host))

    @override
    def cancel(self) -> None:
        if self._coming:
            _, flight = self._coming.pop(0)
            flight.land()

    @override
    def whole(self) -> Tensor:
        """Return the values on the device.

        Raises:
            UsageError: the tensor was written to while it was copied.
        """
        if self._leaving is not None and self._leaving[0]._version == self._version:
            return self._leaving[0]
        self.leave_device()
        if self._torn:
            raise UsageError(
                f"expected the input of a recomputed block, of shape {tuple(self._host.shape)}, to "
                "stay as it was until backward, found it changed in place; do not change it in "
                "place, or take recompute keep='device' to see where autograd notices it"
            )
        if not self._coming:
            self.start()
        tensor, flight = self._coming.pop(0)
        flight.land()
        return tensor


class OffloadedInputs:
    """The inputs of one call of a block, which wait for backward.

    Args:
        previous: the call before it, whose inputs backward needs next.
        window: of calls whose inputs are coming back.
    """

    def __init__(self, previous: "OffloadedInputs | None", window: "CopyWindow") -> None:
        self._previous = None if previous is None else weakref.ref(previous)
        self._window = window
        self._items: list[KeptTensor] = []
        self._awaited = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self._items

    def add(self, item: KeptTensor) -> None:
        """Keep one more input, which other calls may keep, too."""
        self._items.append(item)

    def leave_device(self) -> None:
        """Let go of the device's memory."""
        for item in self._items:
            item.leave_device()

    def start(self) -> None:
        """Start to bring everything back, unless that is under way."""
        if not self._awaited:
            self._window.admit(self)
            self._awaited = len(self._items)
            for item in self._items:
                item.start()

    def cancel(self) -> None:
        """Let go of the values that ``start`` began to bring back."""
        if self._awaited == len(self._items):
            self._awaited = 0
            for item in self._items:
                item.cancel()

    def whole(self, item: KeptTensor) -> Tensor:
        """Return one input, and start to bring those of the previous call back."""
        self.start()
        self._awaited -= 1
        tensor = item.whole()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.start()
        return tensor


class CopyWindow:
    """The last calls that were admitted; of earlier ones the copies are ended.

    Args:
        end: ends the copies of a call.
    """

    def __init__(self, end: Callable[[OffloadedInputs], None]) -> None:
        self._end = end
        self._calls: list[weakref.ReferenceType[OffloadedInputs]] = []

    def admit(self, call: OffloadedInputs) -> None:
        """Let one more call have copies on their way."""
        while len(self._calls) >= AT_ONCE:
            earlier = self._calls.pop(0)()
            if earlier is not None and earlier is not call:
                self._end(earlier)
        self._calls.append(weakref.ref(call))


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
