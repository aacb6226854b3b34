"""New values of a unit that a store's step makes, until forward may see them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from drivetrain.sharding.flat import Flat
from drivetrain.sharding.slot import Slot


class FreshValues:
    """The new values of one unit; memory for them is taken when a step comes to them.

    Attributes:
        slots: the parameters whose values are new.
        awaited: steps that are still to write some of them.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.awaited = 0
        self._buffers: dict[Flat, Tensor] = {}

    def of(self, slot: Slot, *, in_place: bool) -> Tensor | Callable[[], Tensor]:
        """Return where a step writes a parameter's new values, 1-D, on the CPU.

        Args:
            slot: the parameter.
            in_place: whether that may be the very place where forward reads them.
        """
        place = slot.flat.share.place(slot)
        if in_place and place is not None and place.device.type == "cpu":
            return place.detach()
        self.slots.append(slot)
        return partial(self._room, slot)

    def arrive(self) -> None:
        """Let forward see them when the last awaited step has written its part."""
        self.awaited -= 1
        if not self.awaited:
            self.install()

    def install(self) -> None:
        """Let forward see them."""
        for flat, values in self._buffers.items():
            changed = [slot for slot in self.slots if slot.flat is flat]
            with torch.no_grad():
                if sum(slot.owned_numel for slot in changed) == flat.owned:
                    flat.share.replace(values)
                else:
                    for slot in changed:
                        flat.share.write(slot, values[slot.local])
        self._buffers = {}

    def _room(self, slot: Slot) -> Tensor:
        flat = slot.flat
        if flat not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[flat] = torch.empty(flat.owned, dtype=flat.share.dtype, device="cpu")
        return self._buffers[flat][slot.local]
