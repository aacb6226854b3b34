"""The parameters of one kind in a unit, on one rank: their memory, and the shard of this rank.

``values`` holds all of them in the dtype that forward reads. ``shard`` holds what this rank owns,
in the dtype that the optimizer updates; where that is the same dtype and the values are never
freed, it is a part of them.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from drivetrain.parts.deferred import become
from drivetrain.parts.guard import check_ordinary
from drivetrain.parts.units.layout import FlatLayout
from drivetrain.parts.units.slot import Slot

if TYPE_CHECKING:
    from drivetrain.parts.units.unit import Unit

Values = Callable[[str, nn.Parameter], Tensor]
"""Gives the whole values of a parameter; called once for each, in order."""


class Flat:
    """One flat tensor.

    Args:
        layout: what it holds.
        unit: the unit that it is part of.
        parameters: parameters by name.
        rank: this rank among those that share the unit.
        device: where it lives.

    Attributes:
        layout: what it holds.
        unit: the unit that it is part of.
        values: 1-D, all parameters; without memory while a sharded unit is not in use.
        shard: 1-D, what this rank owns.
        slots: its parameters, in order.
        parts: for each rank, what it owns of the values, as views.
    """

    def __init__(
        self,
        layout: FlatLayout,
        unit: "Unit",
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.unit = unit
        self.values = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.slots: list[Slot] = []
        first = 0
        for place in layout.places:
            parameter = parameters[place.name]
            check_ordinary(place.name, parameter)
            slot = Slot(place, parameter, self, rank, first)
            self.slots.append(slot)
            first += slot.owned_numel
        self.parts = self.cut(self.values)
        own = self.parts[rank]
        # Whatever is freed, converted or scattered is kept a second time.
        self.separate = unit.layout.sharded or self.has_master or len(own) > 1
        self.shard = (
            torch.empty(first, dtype=layout.master, device=device)
            if self.separate
            else own[0]
            if own
            else self.values[:0]
        )
        self._own = own
        self._shard_pieces = list(torch.split(self.shard, [part.numel() for part in own]))

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates another dtype than forward reads."""
        return self.layout.master is not self.layout.dtype

    def cut(self, flat: Tensor) -> list[list[Tensor]]:
        """Return what each rank owns of a tensor like the values, as views."""
        size = len(self.layout.places[0].shares)
        return [
            [flat[start:stop] for start, stop in self.layout.pieces(rank)] for rank in range(size)
        ]

    def adopt(self, values: Values) -> None:
        """Copy the parameters' whole values in, and make the parameters views of the flat tensor.

        Args:
            values: gives them.
        """
        for slot in self.slots:
            given = values(slot.name, slot.parameter)
            view = slot.view(self.values)
            if not slot.unit.layout.sharded:
                view.copy_(given)
            if self.separate and slot.owned_numel:
                self.shard[slot.local].copy_(slot.in_memory_order(given)[slice(*slot.owned)])
            if slot.parameter.is_meta:
                become(slot.parameter, view, slot.name)
            else:
                slot.parameter.data = view  # the object and all that hold it stay

    def fill_own(self) -> None:
        """Copy the shard into its places among the values."""
        if self.separate and self._own:
            with torch.no_grad():
                torch._foreach_copy_(self._own, self._shard_pieces)

    def take_own(self) -> None:
        """Copy this rank's places among the values back into the shard, where they changed.

        What nobody changed keeps the digits that the dtype of forward has no room for.
        """
        if self.separate:
            for own, piece in zip(self._own, self._shard_pieces, strict=True):
                piece.copy_(torch.where(piece.to(own.dtype) == own, piece, own))

    def fragment(self, slot: Slot) -> nn.Parameter | None:
        """Return what an optimizer holds in a parameter's place; None where nothing is owned."""
        if slot.fragment is None and slot.owned_numel:
            piece = slot.piece(self.shard)
            slot.fragment = nn.Parameter(piece, requires_grad=slot.parameter.requires_grad)
        return slot.fragment
