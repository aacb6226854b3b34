"""Inputs of blocks in host memory: they leave beside the forward and come back beside backward.

Copies run on streams of their own, one for each direction. Inputs of at most two calls of blocks
are on their way at once, each way, which bounds the device memory that copies take::

    forward of block   i       i+1     i+2            backward of block   i+1     i
    leaving            i-1, i  i, i+1  i+1, i+2       coming              i       i-1

When a third call begins, the compute stream waits for the oldest copies to leave: so it never waits
where copies are faster than blocks. The inputs that left last are still on the device when backward
begins.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.errors import UsageError

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
