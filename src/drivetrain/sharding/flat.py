"""One flat tensor of a unit: the parameters of one kind, side by side, and this rank's shard."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from drivetrain.building import become
from drivetrain.errors import UsageError
from drivetrain.parts.guard import check_ordinary
from drivetrain.sharding.layout import FlatLayout
from drivetrain.sharding.shard import ShardHome, ShardInPlace, make_placeholder
from drivetrain.sharding.slot import ParameterSlot

WholeValues = Callable[[str, nn.Parameter], Tensor]
"""Gives the whole values of a parameter; called once for each, in order."""


class FlatTensor:
    """The parameters of one kind in a unit, side by side in one tensor; and this rank's shard.

    Args:
        layout: which parameters it holds.
        sharded: whether its values are freed between uses.
        apart: whether this rank's shard is kept a second time though values are not freed.
        parameters: parameters by name.
        rank: this rank among those that share the unit.
        device: where it lives.

    Attributes:
        layout: which parameters it holds.
        sharded: whether its values are freed between uses.
        apart: whether gathered values are approximate, so that the shard never lies among them.
        values: 1-D, all parameters in the dtype that forward reads; without memory while freed.
        shard: what this rank owns, in the dtype that the optimizer updates.
        owned: how many elements that are.
        pieces: for each rank, what it owns as ranges of the flat tensor.
        own: what this rank owns of the values, as views.
        slots: its parameters, in order.
        fragments: what optimizers hold in the places of parameters.
        masters_left: whether a store keeps the masters of all its parameters.
        gradient_device: where the gradients of this rank's shard are kept.
    """

    shard: ShardHome

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        device: torch.device,
        *,
        sharded: bool,
        apart: bool = False,
    ) -> None:
        self.layout = layout
        self.sharded = sharded
        self.apart = apart
        self.values = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.slots: list[ParameterSlot] = []
        first = 0
        for place in layout.places:
            parameter = parameters[place.name]
            check_ordinary(place.name, parameter)
            slot = ParameterSlot.of(place, parameter, layout, rank, first)
            self.slots.append(slot)
            first += slot.owned_numel
        self.owned = first
        self.pieces = [layout.pieces(one) for one in range(len(layout.places[0].shares))]
        self.own = [self.values[start:stop] for start, stop in self.pieces[rank]]
        self.fragments: dict[ParameterSlot, nn.Parameter] = {}
        self.masters_left = False
        self.gradient_device = device

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates another dtype than forward reads."""
        return self.layout.master is not self.layout.dtype

    def add_parts(self, flat: Tensor, parts: Sequence[list[Tensor]]) -> None:
        """Add views of a tensor like the values to each rank's parts: the rank's own ranges."""
        for part, pieces in zip(parts, self.pieces, strict=True):
            for start, stop in pieces:
                part.append(flat[start:stop])

    def adopt(self, values: WholeValues) -> None:
        """Copy the parameters' whole values in, and make the parameters views of the flat tensor.

        Args:
            values: gives them.
        """
        for slot in self.slots:
            given = values(slot.name, slot.parameter)
            view = slot.view(self.values)
            if not self.sharded:
                view.copy_(given)
            if slot.owned_numel and self.shard.separate:
                self.shard.write(slot, slot.in_memory_order(given)[slice(*slot.owned)])
            if slot.parameter.is_meta:
                become(slot.parameter, view.data, slot.name)  # .data: a count of its versions
            else:
                slot.parameter.data = view  # the object and all that hold it stay
        self.shard.flush()

    def take_data(self, slot: ParameterSlot) -> None:
        """Copy in the ``data`` that the script set on a parameter, which is a view again then."""
        data, view = slot.parameter.data, slot.view(self.values)
        if data.shape != view.shape or data.dtype is not view.dtype:
            raise UsageError(
                f"expected data of shape {tuple(view.shape)} and {view.dtype} for {slot.name!r}, "
                f"found {tuple(data.shape)} and {data.dtype}, set by 'parameter.data = ...'; "
                "change shapes and dtypes before prepare()"
            )
        view.copy_(data)
        slot.parameter.data = view

    def leave_masters(self) -> None:
        """Keep only the values that forward reads: a store keeps all masters."""
        self.masters_left = True
        if self.sharded or self.apart:
            self.shard.narrow(self.layout.dtype)
        else:
            self.shard = ShardInPlace(self.values, self.own)

    def fragment(self, slot: ParameterSlot) -> nn.Parameter | None:
        """Return the fragment that an optimizer holds for a parameter; None without a share."""
        found = self.fragments.get(slot)
        if found is not None or not slot.owned_numel:
            return found
        memory = self.shard.tensor
        if memory is None:  # a store will keep the master
            fragment = nn.Parameter(torch.empty(0, dtype=self.layout.master))
            make_placeholder(slot, fragment, self.layout.master)
        else:
            fragment = nn.Parameter(slot.piece(memory))
        fragment.requires_grad_(slot.parameter.requires_grad)
        self.fragments[slot] = fragment
        return fragment

    def with_gradients(self) -> dict[ParameterSlot, Tensor]:
        """Return the gradients of this rank's fragments, in order, without None."""
        found = {}
        for slot in self.slots:
            fragment = self.fragments.get(slot)
            if fragment is not None and fragment.grad is not None:
                found[slot] = fragment.grad
        return found
