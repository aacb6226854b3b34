"""The gradients of one flat tensor on one rank: the buffer they arrive in, and what is kept.

::

    autograd's --x 1/N--> buffer --reduce-scatter in place--> own pieces --> kept --> fragments

Whoever keeps whole gradients keeps the buffer: where its own pieces are one range, the fragments'
gradients are views of it, and micro-batches may add to it without sending anything. Otherwise the
buffer is borrowed for the time between the first gradient and the end of the reduction, and only
what the rank owns is kept. Gradients of low precision are added up in fp32.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.sharding.flat import Flat
from drivetrain.sharding.kept import stand_in
from drivetrain.sharding.slot import Slot


class FlatGradients:
    """The gradients of one flat tensor.

    Args:
        flat: the flat tensor.
        wire: dtype in which gradients cross ranks.
        total: dtype in which they are added up.
        stays: whether a buffer is kept for good; otherwise it is borrowed.

    Attributes:
        flat: the flat tensor.
        wire: dtype in which gradients cross ranks.
        buffer: 1-D, where gradients arrive; None while there is none.
        sent: 1-D, what is being reduced; None while nothing is.
    """

    def __init__(self, flat: Flat, wire: torch.dtype, total: torch.dtype, *, stays: bool) -> None:
        self.flat = flat
        self.wire = wire
        self.buffer: Tensor | None = None
        self.sent: Tensor | None = None
        self._total = total
        self._stays = stays
        self._views: dict[Slot, Tensor] = {}
        self._kept: Tensor | None = None
        self._waiting: Tensor | None = None
        self._crossing: Tensor | None = None

    # --- filling ---

    def use(self, buffer: Tensor | None) -> None:
        """Let gradients arrive in a buffer like the flat tensor; None takes it away."""
        self.buffer = buffer
        self._views = {}
        if buffer is not None:
            self._views = {slot: slot.view(buffer) for slot in self.flat.slots}

    def receive(self, slot: Slot, scale: float) -> None:
        """Move a parameter's fresh gradient into the buffer, times a scale.

        Raises:
            UsageError: the gradient is sparse or part of a graph.
        """
        grad = slot.parameter.grad
        if grad is None:
            return
        _check_gradient(slot, grad)
        if slot.filled:
            self._promote()
            self._views[slot].add_(grad, alpha=scale)
        else:
            torch.mul(grad, scale, out=self._views[slot])  # one pass over memory
            slot.filled = True
        slot.parameter.grad = None

    def scale(self, factor: float) -> None:
        """Multiply what was received."""
        for slot, view in self._views.items():
            if slot.filled:
                view.mul_(factor)
        if self._waiting is not None:
            self._waiting.mul_(factor)

    def set_aside(self) -> None:
        """Save gradients that lie in the buffer and were not cleared: this round adds to them."""
        kept = self._kept
        if kept is None or self.buffer is None or not _shares(kept, self.buffer):
            return
        if any(_has_gradient(slot) for slot in self.flat.slots):
            self._move(kept)

    def _move(self, kept: Tensor) -> None:
        """Keep the gradients that fragments have in other memory."""
        self._kept = kept.clone()
        for slot in self.flat.slots:
            if _has_gradient(slot):
                self._follow(slot)
                self.hand_out(slot)

    def _promote(self) -> None:
        """Go on in the dtype of sums: a second gradient is about to be added."""
        if self.buffer is not None and self.buffer.dtype is not self._total:
            self.use(self.buffer.to(self._total))

    # --- reducing ---

    def fill_gaps(self) -> list[Slot]:
        """Write zeros where no gradient came; return the parameters."""
        missing = [slot for slot in self.flat.slots if not slot.filled]
        for slot in missing:
            self._views[slot].zero_()
        for slot in self.flat.slots:
            slot.filled = False
        return missing

    def outgoing(self) -> list[list[Tensor]]:
        """Return what is to be reduced for each rank: views of what is sent from here."""
        buffer = self.buffer
        if buffer is None:
            raise UsageError(f"no gradients of {self.flat.unit.label} are there to be sent")
        self.sent = buffer if buffer.dtype is self.wire else buffer.to(self.wire)
        return self.flat.cut(self.sent)

    def settle(self) -> None:
        """Keep the shares that were reduced."""
        self._keep(self._reduced())
        self.sent = None

    # --- between replicas ---

    def put_by(self) -> None:
        """Add the shares that were reduced to those that wait for the replicas' ones."""
        share, owned = self._reduced(), self._owned()
        if self._waiting is None:
            device = self.flat.values.device
            self._waiting = torch.empty(self.flat.owned, dtype=self._total, device=device)
            _copy([self._waiting[slot.local] for slot in owned], [share(slot) for slot in owned])
        else:
            for slot in owned:
                self._waiting[slot.local].add_(share(slot))
        self.sent = None

    def crossing(self) -> Tensor:
        """Return what is to be added up over replicas, 1-D, in place."""
        waiting = self._waiting
        if waiting is None:
            raise UsageError(f"no gradients of {self.flat.unit.label} wait for other replicas")
        self._crossing = waiting if waiting.dtype is self.wire else waiting.to(self.wire)
        return self._crossing

    def arrive(self) -> None:
        """Keep what was added up over replicas."""
        crossing = self._crossing
        if crossing is not None:
            self._keep(lambda slot: crossing[slot.local])
        self._waiting = self._crossing = None

    def drop_waiting(self, slots: Collection[Slot]) -> None:
        """Forget what waits for replicas, of some parameters."""
        if self._waiting is not None:
            for slot in slots:
                self._waiting[slot.local].zero_()

    # --- keeping ---

    def _owned(self) -> list[Slot]:
        return [slot for slot in self.flat.slots if slot.owned_numel]

    def _reduced(self) -> Callable[[Slot], Tensor]:
        """Return what tells a parameter's share of what was sent and reduced, 1-D."""
        sent = self.sent
        if sent is None:
            raise UsageError(f"no gradients of {self.flat.unit.label} were sent")
        return lambda slot: sent[slot.own]

    def _keep(self, share: Callable[[Slot], Tensor]) -> None:
        """Add shares to the gradients that fragments have, or keep them as these."""
        owned, kept = self._owned(), self._kept
        if not any(_has_gradient(slot) for slot in owned):
            self._kept = self._kept_anew(share, owned)
            return
        if kept is None:
            return
        for slot in owned:
            if _has_gradient(slot):
                self._follow(slot)
        kept = self._widen(kept)
        for slot in owned:
            if _has_gradient(slot):
                kept[slot.local].add_(share(slot).to(kept.device))
            else:
                kept[slot.local].copy_(share(slot))

    def _kept_anew(self, share: Callable[[Slot], Tensor], owned: Sequence[Slot]) -> Tensor:
        in_place = self._in_place()
        if in_place is not None:
            return in_place
        kept = self._kept
        dtype = self._first_dtype()
        if (
            kept is None
            or kept.dtype is not dtype
            or (self.buffer is not None and _shares(kept, self.buffer))
        ):
            kept = torch.empty(self.flat.owned, dtype=dtype, device=self.flat.gradient_device)
        _copy([kept[slot.local] for slot in owned], [share(slot) for slot in owned])
        return kept

    def _in_place(self) -> Tensor | None:
        """Return this rank's shares as a view of a buffer that stays, if they are one range."""
        sent, pieces = self.sent, self.flat.layout.pieces(self.flat.unit.communicator.rank)
        if sent is None or sent is not self.buffer or not self._stays or len(pieces) != 1:
            return None
        if sent.device != self.flat.gradient_device:
            return None
        return sent[slice(*pieces[0])] if sent.dtype is self._first_dtype() else None

    def _first_dtype(self) -> torch.dtype:
        """Return the dtype in which a gradient is kept to which none was added."""
        return self.wire if self.flat.masters_left else self._total

    def _widen(self, kept: Tensor) -> Tensor:
        """Go on in the dtype of sums."""
        if kept.dtype is self._total:
            return kept
        self._kept = kept.to(self._total)
        for slot in self.flat.slots:
            if _has_gradient(slot):
                self.hand_out(slot)
        return self._kept

    def widen(self) -> None:
        """Keep gradients in the dtype of sums: they are about to be changed in place."""
        if self._kept is not None:
            self._widen(self._kept)

    def give_away(self) -> None:
        """Let go of the memory of gradients that were taken: somebody else reads it.

        Those that fragments still have, as where another optimizer steps them, move.
        """
        kept, self._kept = self._kept, None
        if kept is None:
            return
        if any(_has_gradient(slot) for slot in self.flat.slots):
            self._move(kept)
        if self.buffer is not None and _shares(kept, self.buffer):
            self.use(None)

    # --- handing out ---

    def hand_out(self, slot: Slot) -> None:
        """Give a parameter's fragment its gradient."""
        fragment = self.flat.fragment(slot)
        if fragment is None or self._kept is None:
            return
        piece = slot.piece(self._kept)
        if self.flat.masters_left and fragment.dtype is not piece.dtype:
            stand_in(slot, piece.dtype)
        fragment.grad = piece if piece.dtype is fragment.dtype else piece.to(fragment.dtype)

    def _follow(self, slot: Slot) -> None:
        """Take over what was done to a handed out gradient that is no view of what is kept.

        Elements that nobody changed keep the digits that the fragment's dtype has no room for.
        """
        grad = None if slot.fragment is None else slot.fragment.grad
        if grad is None or self._kept is None or _shares(grad, self._kept):
            return
        piece = slot.piece(self._kept)
        piece.copy_(torch.where(piece.to(grad.dtype) == grad, piece, grad))


def _check_gradient(slot: Slot, grad: Tensor) -> None:
    if grad.requires_grad or grad.layout is not torch.strided:
        found = "part of a graph" if grad.requires_grad else f"{grad.layout}"
        raise UsageError(
            f"the gradient of {slot.name!r} is {found}, expected a dense one outside of autograd; "
            "use torch.autograd.grad for gradients of gradients, and sparse=False for embeddings"
        )


def _has_gradient(slot: Slot) -> bool:
    return slot.fragment is not None and slot.fragment.grad is not None


def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(values))


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
