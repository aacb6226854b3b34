"""The parameters of one kind in a unit, on one rank: their memory, and the shard of this rank.

``values`` holds all of them in the dtype that forward reads. ``share`` holds what this rank owns,
in the dtype that the optimizer updates; where that is the same dtype and the values are never
freed, it is a part of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from drivetrain.building import become
from drivetrain.parts.guard import check_ordinary
from drivetrain.sharding.kept import stand_in
from drivetrain.sharding.layout import FlatLayout
from drivetrain.sharding.share import Share, ShareInMemory, ShareInPlace, ShareInStore
from drivetrain.sharding.slot import Slot
from drivetrain.store import TensorStore

if TYPE_CHECKING:
    from drivetrain.sharding.unit import Unit

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
        store: where this rank's share lies while a sharded unit is not in use; None: in memory.

    Attributes:
        layout: what it holds.
        unit: the unit that it is part of.
        values: 1-D, all parameters; without memory while a sharded unit is not in use.
        share: what this rank owns.
        owned: how many elements that are.
        masters_left: whether a store keeps the masters of all its parameters.
        gradient_device: where the gradients of what this rank owns are kept.
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
        store: TensorStore | None = None,
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
        self.owned = first
        self.masters_left = False
        self.gradient_device = device
        self.parts = self.cut(self.values)
        self.share = self._make_share(self.parts[rank], store)

    def _make_share(self, own: Sequence[Tensor], store: TensorStore | None) -> Share:
        numel, dtype = self.owned, self.layout.master
        sharded = self.unit.layout.sharded
        if sharded and store is not None:
            key = f"parameters of {self.unit.label}, {self.slots[0].name} and on"
            return ShareInStore(numel, dtype, own, store, key)
        # Whatever is freed, converted or scattered is kept a second time.
        if sharded or self.has_master or len(own) > 1:
            return ShareInMemory(numel, dtype, own, self.values.device)
        return ShareInPlace(self.values, own)

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
            if slot.owned_numel and self.share.separate:
                self.share.write(slot, slot.in_memory_order(given)[slice(*slot.owned)])
            if slot.parameter.is_meta:
                become(slot.parameter, view, slot.name)
            else:
                slot.parameter.data = view  # the object and all that hold it stay
        self.share.settle()

    def leave_masters(self) -> None:
        """Keep what forward reads only: a store keeps the masters of all its parameters."""
        self.masters_left = True
        if not self.unit.layout.sharded:
            own = self.parts[self.unit.communicator.rank]
            self.share = ShareInPlace(self.values, own)
        else:
            self.share.narrow(self.layout.dtype)

    def fragment(self, slot: Slot) -> nn.Parameter | None:
        """Return what an optimizer holds in a parameter's place; None where nothing is owned."""
        if slot.fragment is None and slot.owned_numel:
            memory = self.share.tensor
            if memory is None:  # a store will keep the master
                slot.fragment = nn.Parameter(torch.empty(0, dtype=self.layout.master))
                stand_in(slot, self.layout.master)
            else:
                slot.fragment = nn.Parameter(slot.piece(memory))
            slot.fragment.requires_grad_(slot.parameter.requires_grad)
        return slot.fragment
