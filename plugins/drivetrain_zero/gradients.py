"""One unit's gradients on one rank: the buffer they arrive in, and the owned range that is kept.

::

    autograd's gradient --x 1/N--> buffer --reduce-scatter in place--> owned chunk --> fragments

Stage 1 keeps the buffer: the fragments' gradients are views of its owned chunk, and micro-batches
may add to it without sending anything. From stage 2 on the buffer is borrowed for the time between
the first gradient and the end of the reduction, and only the owned range is kept. Gradients of low
precision are added up in fp32.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.parts.collectives.communicator import Handle
from drivetrain_zero.unit import FlatUnit, Slot


class UnitGradients:
    """The gradients of one unit.

    Args:
        unit: the unit.
        wire: dtype in which gradients cross ranks.
        total: dtype in which they are added up.
        lend: lends a buffer of (numel, dtype); None keeps one buffer for good.
        take_back: takes a lent buffer back.

    Attributes:
        awaited: the parameters that gradients are expected for in this round.
        pending: how many of them have not come.
        missing: those without any gradient on this rank.
    """

    def __init__(
        self,
        unit: FlatUnit,
        wire: torch.dtype,
        total: torch.dtype,
        lend: Callable[[int, torch.dtype], Tensor] | None,
        take_back: Callable[[Tensor], None],
    ) -> None:
        self.unit = unit
        self.awaited: list[Slot] = []
        self.pending = 0
        self.missing: set[Slot] = set()
        self._wire = wire
        self._total = total
        self._lend = lend
        self._take_back = take_back
        self._buffer: Tensor | None = None
        self._views: dict[Slot, Tensor] = {}
        self._opened = False
        self._kept: Tensor | None = None
        self._sent: Tensor | None = None
        self._reduction: Handle | None = None

    def begin(self) -> bool:
        """Begin a round; return whether any gradient is expected."""
        self.awaited = [slot for slot in self.unit.slots if slot.parameter.requires_grad]
        self.pending = len(self.awaited)
        self.missing.clear()
        return bool(self.awaited)

    @property
    def on_its_way(self) -> bool:
        """Whether the buffer is being reduced."""
        return self._reduction is not None

    # --- filling ---

    def receive(self, slot: Slot, scale: float) -> None:
        """Move a parameter's fresh gradient into the buffer, times a scale.

        Raises:
            UsageError: the gradient is sparse or part of a graph.
        """
        grad = slot.parameter.grad
        if grad is None:
            return
        _check_gradient(slot, grad)
        if not self._opened:
            self._open()
        if slot.filled:
            self._promote()
            self._views[slot].add_(grad, alpha=scale)
        else:
            torch.mul(grad, scale, out=self._views[slot])  # one pass over memory
            slot.filled = True
        slot.parameter.grad = None

    def scale(self, factor: float) -> None:
        """Multiply what was received and not sent."""
        if self._opened and self._reduction is None:
            for slot in self.unit.slots:
                if slot.filled:
                    self._views[slot].mul_(factor)

    def forget(self, only: Collection[Slot] | None = None) -> None:
        """Drop what was received and not sent, of some parameters or of all."""
        if not self._opened:
            return
        for slot in self.unit.slots if only is None else only:
            slot.filled = False
        if self._reduction is None and not any(slot.filled for slot in self.unit.slots):
            self._close()

    def _open(self) -> None:
        self._opened = True
        if self._buffer is None:
            numel = self.unit.layout.numel
            if self._lend is None:
                self._view(torch.zeros(numel, dtype=self._wire, device=self.unit.shard.device))
            else:
                self._view(self._lend(numel, self._wire))
        elif self._kept is not None and _shares(self._kept, self._buffer):
            self._set_aside()

    def _view(self, buffer: Tensor) -> None:
        self._buffer = buffer
        first = buffer.storage_offset()
        self._views = {
            slot: buffer.as_strided(slot.shape, slot.strides, first + slot.offset)
            for slot in self.unit.slots
        }

    def _set_aside(self) -> None:
        """Save gradients that lie in the buffer and were not cleared: this round adds to them."""
        if self._kept is not None and any(_has_gradient(slot) for slot in self.unit.slots):
            self._kept = self._kept.clone()
            for slot in self.unit.slots:
                if _has_gradient(slot):
                    self._follow(slot)
                    self._hand_out(slot)

    def _promote(self) -> None:
        """Go on in the dtype of sums: a second gradient is about to be added."""
        if self._buffer is not None and self._buffer.dtype is not self._total:
            low = self._buffer
            self._view(low.to(self._total))
            if self._lend is not None:
                self._take_back(low)

    # --- reducing ---

    def launch(self) -> None:
        """Send the buffer on its way; parameters without a gradient count as zeros."""
        if not self._opened:
            self._open()
        buffer = self._buffer
        if buffer is None:
            return
        for slot in self.unit.slots:
            if not slot.filled:
                self._views[slot].zero_()
                self.missing.add(slot)
            slot.filled = False
        self._sent = buffer if buffer.dtype is self._wire else buffer.to(self._wire)
        self._reduction = self.unit.communicator.reduce_scatter(
            self._sent, chunks=self.unit.layout.chunks, label=f"gradients of {self.unit.label}"
        )

    def settle(self) -> None:
        """Wait for the reduction and keep the owned range."""
        if self._reduction is None or self._sent is None:
            return
        self._reduction.wait()
        start, stop = self.unit.chunk
        chunk = self._sent[start:stop]
        owned = [slot for slot in self.unit.slots if slot.owned_numel]
        held = [slot for slot in owned if _has_gradient(slot)]
        if not held:
            self._keep(chunk)
        elif self._kept is not None:
            for slot in owned:
                piece = self._kept[slot.local()]
                if _has_gradient(slot):
                    self._follow(slot)
                    piece.add_(chunk[slot.local()])
                else:
                    piece.copy_(chunk[slot.local()])
        self._reduction = self._sent = None
        self._close()

    def _keep(self, chunk: Tensor) -> None:
        if self._lend is None and self._sent is self._buffer and chunk.dtype is self._total:
            self._kept = chunk
            return
        if (
            self._kept is None
            or self._kept.dtype is not self._total
            or (self._buffer is not None and _shares(self._kept, self._buffer))
        ):
            self._kept = torch.empty_like(chunk, dtype=self._total)
        self._kept.copy_(chunk)

    def _close(self) -> None:
        self._opened = False
        if self._buffer is None:
            return
        if self._lend is not None:
            self._take_back(self._buffer)
        elif self._buffer.dtype is self._wire:
            return  # kept for good; what sums were made in is larger
        self._buffer = None
        self._views = {}

    # --- handing out ---

    def deliver(self, slots: list[Slot]) -> None:
        """Give these parameters' fragments their gradients."""
        for slot in slots:
            self._hand_out(slot)

    def _hand_out(self, slot: Slot) -> None:
        fragment = self.unit.fragment(slot)
        if fragment is None or self._kept is None:
            return
        piece = self._piece(self._kept, slot)
        fragment.grad = piece if piece.dtype is fragment.dtype else piece.to(fragment.dtype)

    def _follow(self, slot: Slot) -> None:
        """Take over what was done to a handed out gradient that is no view of the kept range.

        Elements that nobody changed keep the digits that the fragment's dtype has no room for.
        """
        grad = None if slot.fragment is None else slot.fragment.grad
        if grad is None or self._kept is None or _shares(grad, self._kept):
            return
        piece = self._piece(self._kept, slot)
        piece.copy_(torch.where(piece.to(grad.dtype) == grad, piece, grad))

    def _piece(self, kept: Tensor, slot: Slot) -> Tensor:
        """Return a parameter's owned range, in the shape that its fragment has."""
        piece = kept[slot.local()]
        if self.unit.layout.whole_parameters:
            return piece.as_strided(slot.shape, slot.strides, piece.storage_offset())
        return piece


def _check_gradient(slot: Slot, grad: Tensor) -> None:
    if grad.requires_grad or grad.layout is not torch.strided:
        found = "part of a graph" if grad.requires_grad else f"{grad.layout}"
        raise UsageError(
            f"the gradient of {slot.name!r} is {found}, expected a dense one outside of autograd; "
            "use torch.autograd.grad for gradients of gradients, and sparse=False for embeddings"
        )


def _has_gradient(slot: Slot) -> bool:
    return slot.fragment is not None and slot.fragment.grad is not None


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
