"""What stands at ``p.grad`` of a model's parameters, and what a script has done to it.

The gradients themselves lie in buffers and fragments (``gradients.py``). Between steps a parameter
has a ``DividedGradient``, made once; a script that clears it, or puts a tensor in its place, is
followed before anybody uses the gradients.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.parts.divided_gradient import DividedGradient
from drivetrain.parts.norms import norms_of_each
from drivetrain.sharding.gradients import UnitGradients
from drivetrain.sharding.layout import ParameterSlot
from drivetrain.sharding.placement import Ranks

logger = get_logger(__name__)


class Settles(Protocol):
    """Makes gradients ready for a change."""

    def settle(self, unit: UnitGradients) -> None:
        """Wait for what reads a unit's gradients, and multiply what waits for a factor."""

    def forget(self, only: Iterable[ParameterSlot] | None, *, set_to_none: bool) -> None:
        """Drop gradients that wait to be sent or multiplied."""


class ShownGradients:
    """The gradients of one model as its script sees them.

    Args:
        ranks: those that train the model.
        settles: the model's reduction.
        device: that of the model.

    Attributes:
        of: what stands at each parameter's ``grad`` while there is a gradient.
    """

    def __init__(self, ranks: Ranks, settles: Settles, device: torch.device) -> None:
        self.ranks = ranks
        self.of: dict[ParameterSlot, DividedGradient] = {}
        self._units: dict[ParameterSlot, UnitGradients] = {}
        self._settles = settles
        self._device = device
        self._norms: dict[float, dict[ParameterSlot, Tensor]] = {}
        self._told = False

    def watch(self, unit: UnitGradients) -> None:
        """Show the gradients of one more unit."""
        for slot in unit.unit.slots:
            self._units[slot] = unit
            self.of[slot] = DividedGradient(slot.parameter, SlotPlace(self, slot))

    def changed(self) -> None:
        """Forget what was measured: gradients are about to change."""
        self._norms.clear()

    # --- what the script did ---

    def follow(self, slots: Iterable[ParameterSlot] | None = None) -> None:
        """Drop gradients that the script has cleared, and take those that it has assigned.

        Args:
            slots: of the parameters to look at; None: all.
        """
        chosen = self._units if slots is None else [slot for slot in slots if slot in self._units]
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter answers slowly
            touched = {
                slot: grad for slot in chosen if (grad := slot.parameter.grad) is not self.of[slot]
            }
        self._drop([slot for slot, grad in touched.items() if grad is None])
        for slot, grad in touched.items():
            if grad is not None:
                self._assign(slot, grad)

    def drop_cleared(self, slot: ParameterSlot) -> None:
        """Drop what a parameter had before the script cleared it: a fresh gradient has arrived.

        With it everything else that was cleared: the next gradients find nothing to drop.
        """
        with torch._C.DisableTorchFunctionSubclass():
            cleared = [each for each in self._units if each.parameter.grad is None]
        self._drop([slot, *cleared])

    def _drop(self, slots: Sequence[ParameterSlot]) -> None:
        """Let parameters have no gradient: neither what was averaged nor what waits."""
        having = [slot for slot in slots if self._units[slot].of[slot].has(slot)]
        if not having:
            return
        self._settles.forget(having, set_to_none=True)
        for slot in having:
            fragment = self._units[slot].of[slot].flat.fragments.get(slot)
            if fragment is not None:
                fragment.grad = None

    def _assign(self, slot: ParameterSlot, given: Tensor) -> None:
        unit = self._units[slot]
        if isinstance(given, DividedGradient) and given.place is self.of[slot].place:
            values = given.piece()
        else:
            values = slot.cut(_whole(given))
        self._drop([slot])
        self._settles.settle(unit)
        unit.of[slot].assign(slot, values)
        self.changed()
        self.show(slot)

    def zero(self, slot: ParameterSlot) -> None:
        """Let a parameter's gradient be zero."""
        self._assign(slot, torch.zeros((), device=self._device).expand(slot.shape))

    def show(self, slot: ParameterSlot) -> None:
        """Let a parameter have a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            slot.parameter.grad = self.of[slot]

    def clear(self, slots: Iterable[ParameterSlot]) -> None:
        """Let parameters have none."""
        with torch._C.DisableTorchFunctionSubclass():
            for slot in slots:
                slot.parameter.grad = None

    # --- what the script reads ---

    def norm(self, slot: ParameterSlot, norm_type: float) -> Tensor:
        """Return the norm of a whole gradient; those of all are measured together. Collective."""
        if norm_type not in self._norms:
            self._check_averaged(slot)
            self.follow()
            pieces = [self._piece_or_none(each) for each in self._units]
            norms = norms_of_each(pieces, norm_type, over=self._sharing(), device=self._device)
            self._norms[norm_type] = dict(zip(self._units, norms.unbind(), strict=True))
        return self._norms[norm_type][slot]

    def _piece_or_none(self, slot: ParameterSlot) -> Tensor | None:
        return self.piece(slot) if self._units[slot].of[slot].has(slot) else None

    def _sharing(self) -> Sequence[Communicator]:
        return [self.ranks.sharing] if self.ranks.sharing.size > 1 else []

    def piece(self, slot: ParameterSlot) -> Tensor:
        """Return this rank's piece of a gradient.

        Raises:
            UsageError: it waits to be averaged, or a store's step has taken it.
        """
        self._check_averaged(slot)
        unit = self._units[slot]
        flat = unit.of[slot]
        if not slot.owned_numel:
            return torch.empty(0, dtype=slot.master, device=self._device)
        self._settles.settle(unit)
        flat.to_sum_dtype()
        fragment = flat.flat.fragment(slot)
        if fragment is None or fragment.grad is None:
            raise UsageError(
                f"expected the gradient of {slot.name!r} before the optimizer's step, found that "
                "the step has taken it; read it between backward() and step()"
            )
        return fragment.grad

    def _check_averaged(self, slot: ParameterSlot) -> None:
        if self._units[slot].of[slot].waits(slot):
            raise UsageError(
                f"expected the gradient of {slot.name!r} after the last micro-batch of an "
                "accumulation window, found it in mid-window, where ranks have not averaged it; "
                "read and change gradients where accelerator.sync_gradients is true"
            )

    def whole(self, slot: ParameterSlot, piece: Tensor) -> Tensor:
        """Return a tensor whose pieces lie on ranks. Collective."""
        if not self._told:
            self._told = True
            logger.announce(
                f"the gradient of {slot.name!r} is read whole: all ranks bring their pieces "
                "together each time; every rank must read it. Norms and changes element by "
                "element need no such exchange"
            )
        narrow = piece.dtype is torch.bool
        values = torch.zeros(
            slot.numel, dtype=torch.uint8 if narrow else piece.dtype, device=self._device
        )
        if slot.owned_numel:
            values[slice(*slot.owned)] = slot.fragment_in_order(piece).to(values)
        for communicator in self._sharing():
            communicator.all_reduce(values, label=f"gradient of {slot.name}").wait()
        whole = values.as_strided(slot.shape, slot.strides)
        return whole.bool() if narrow else whole


class SlotPlace:
    """Where the piece of one parameter's gradient lies.

    Args:
        shown: the gradients of the model.
        slot: the parameter's.
    """

    def __init__(self, shown: ShownGradients, slot: ParameterSlot) -> None:
        self.name = slot.name
        self._shown, self._slot = shown, slot

    def piece(self) -> Tensor:
        """Return this rank's piece."""
        return self._shown.piece(self._slot)

    def clear(self) -> None:
        """Write zeros."""
        self._shown.zero(self._slot)

    def changed(self) -> None:
        """Forget what was measured."""
        self._shown.changed()

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the parameter's shape."""
        return self._slot.cut(whole)

    def whole(self, piece: Tensor) -> Tensor:
        """Bring the pieces of all ranks together. Collective."""
        return self._shown.whole(self._slot, piece)

    def norm(self, norm_type: float) -> Tensor:
        """Return the norm of the whole gradient. Collective, once for all gradients."""
        return self._shown.norm(self._slot, norm_type)


def _whole(given: Tensor) -> Tensor:
    return given.whole() if isinstance(given, DividedGradient) else given
