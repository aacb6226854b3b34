"""The gradients that this rank's fragments have between backward and step: read, scaled, clipped.

A factor for what a store steps is not multiplied in: it goes with the step, which reads each
gradient once anyway. Whoever asks for the gradients themselves gets them with their factors.
"""

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.parts.norms import clip_, clip_factor, global_norm
from drivetrain.sharding.offload import Offload
from drivetrain.sharding.placement import Placement
from drivetrain.sharding.reducer import Reducer
from drivetrain.sharding.slot import Slot
from drivetrain.sharding.unit import Unit


class OwnedGradients:
    """What this rank owns of the gradients of one model.

    Args:
        placement: its parameters.
        offload: what stores step.
        reducer: gives what brings the gradients.
        sharing: the ranks that own the rest.
        device: that of the model.
    """

    def __init__(
        self,
        placement: Placement,
        offload: Offload,
        reducer: Callable[[], Reducer],
        sharing: Communicator,
        device: torch.device,
    ) -> None:
        self._placement = placement
        self._offload = offload
        self._reducer = reducer
        self._over = [sharing] if sharing.size > 1 else []
        self._device = device

    def read(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield gradients that may be read and changed in place."""
        slots = [slot for slot, _ in self._complete(only)]
        self._reducer().widen(slot for slot in slots if slot.flat.masters_left)
        yield from (gradient for _, gradient in self._placement.gradients(only))

    def scale(self, factor: float) -> None:
        """Multiply all of them, those too that wait in buffers."""
        self._multiply([slot for slot, _ in self._complete()], factor)
        self._reducer().scale(factor)

    def clip(
        self, max_norm: float, norm_type: float, only: Collection[nn.Parameter] | None
    ) -> Tensor:
        """Scale them to a norm of at most max_norm; return the norm before, 0-d.

        One number crosses the wire.
        """
        found = self._complete(only)
        gradients = [gradient for _, gradient in found]
        norm = global_norm(gradients, norm_type, over=self._over, device=self._device)
        if not self._offload.active:
            clip_(gradients, norm, max_norm)
        elif found:
            self._multiply([slot for slot, _ in found], float(clip_factor(norm, max_norm)))
        return norm

    def forget(self, slots: Collection[Slot] | None, *, set_to_none: bool) -> None:
        """Drop what waits to be sent or multiplied, before gradients are cleared.

        Args:
            slots: whose gradients; None: all.
            set_to_none: whether they are dropped; otherwise zeros are written.
        """
        reducer = self._reducer()
        reducer.rounds.finish()  # what an exception cut short must not come after this
        reducer.forget(slots)
        self._offload.forget(slots)
        if not set_to_none:  # a step under way reads where zeros are about to be written
            for unit in self._placement.units:
                unit.settle()

    def make_way(self, unit: Unit) -> None:
        """Make a unit's gradients ready for a change."""
        unit.settle()  # a step under way reads them
        late = dict(self._offload.factors(unit.slots))
        self._reducer().widen(late)
        _multiply(late)

    def _complete(self, only: Collection[nn.Parameter] | None = None) -> list[tuple[Slot, Tensor]]:
        """Return gradients that nobody changes any more, and that wait for no factor."""
        self._reducer().rounds.finish()
        for unit in {slot.unit for slot, _ in self._placement.gradients(only)}:
            self.make_way(unit)
        return list(self._placement.gradients(only))

    def _multiply(self, slots: Collection[Slot], factor: float) -> None:
        _multiply(dict.fromkeys(self._offload.scale(slots, factor), factor))


def _multiply(factors: Mapping[Slot, float]) -> None:
    for slot, factor in factors.items():
        if slot.fragment is not None and slot.fragment.grad is not None:
            slot.fragment.grad.mul_(factor)
