"""One flat unit on one rank: its parameters, the range this rank owns, and the memory of both.

A resident unit keeps its parameters whole: they are views of ``flat``, and an all-gather in place
brings what the other ranks updated. A sharded unit keeps only this rank's range; ``flat`` gets
memory before use and loses it after. The parameter objects and their views stay the same
throughout, so what autograd saved is valid again as soon as the values are.

Where forward reads a lower precision than the optimizer updates, the owned range exists a second
time in the master's dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.errors import CollectiveError
from drivetrain.parts.buckets import is_dense
from drivetrain.parts.collectives import Communicator
from drivetrain.parts.collectives.communicator import Handle
from drivetrain.parts.collectives.solo import Finished
from drivetrain.parts.deferred import become
from drivetrain.parts.guard import Guard, check_ordinary, guard, unguard
from drivetrain_zero.layout import UnitLayout


class Slot:
    """One parameter in its unit.

    Attributes:
        name: the parameter's name.
        parameter: the parameter, the user's own object.
        unit: the unit it lies in.
        offset: where it begins in the flat tensor.
        owned: the (start, stop) of the parameter, in the order of its memory, that this rank owns.
        strides: strides of the parameter; the flat tensor holds it in this order.
        fragment: what the optimizer holds in the parameter's place; None where nothing is owned.
        round: the round in which its gradient last came.
        filled: whether its place in the gradient buffer holds a gradient.
    """

    __slots__ = (
        "filled",
        "fragment",
        "name",
        "numel",
        "offset",
        "owned",
        "parameter",
        "round",
        "shape",
        "strides",
        "unit",
    )

    def __init__(self, name: str, parameter: nn.Parameter, unit: "FlatUnit", offset: int) -> None:
        start, stop = unit.chunk
        self.name = name
        self.parameter = parameter
        self.unit = unit
        self.offset = offset
        self.numel = parameter.numel()
        self.shape = tuple(parameter.shape)
        dense = is_dense(parameter)
        self.strides = (
            parameter.stride() if dense else torch.empty(self.shape, device="meta").stride()
        )
        first = min(max(start - offset, 0), self.numel)
        last = min(max(stop - offset, 0), self.numel)
        self.owned = (first, max(first, last))
        self.fragment: nn.Parameter | None = None
        self.round = 0
        self.filled = False

    @property
    def contiguous(self) -> bool:
        """Whether the order of memory is that of the flattened parameter."""
        plain = torch.empty(self.shape, device="meta").stride()
        return all(
            mine == usual or size == 1
            for mine, usual, size in zip(self.strides, plain, self.shape, strict=True)
        )

    @property
    def owned_numel(self) -> int:
        """Elements that this rank owns."""
        return self.owned[1] - self.owned[0]

    def in_memory_order(self, values: Tensor) -> Tensor:
        """Return a parameter-shaped tensor's elements in the order of the parameter's memory.

        Args:
            values: of the parameter's shape and any strides.

        Returns:
            1-D, a copy.
        """
        ordered = values.new_empty(self.numel)
        ordered.as_strided(self.shape, self.strides).copy_(values)
        return ordered

    def local(self) -> slice:
        """Return where the owned range lies in the unit's shard."""
        start = self.offset + self.owned[0] - self.unit.chunk[0]
        return slice(start, start + self.owned_numel)


class NearPart:
    """One rank's part of a unit's values that its neighbors hold together.

    Args:
        flat: 1-D, all values; this rank's part is copied.
        neighbors: the ranks that hold a part each.
    """

    def __init__(self, flat: Tensor, neighbors: Communicator) -> None:
        self._neighbors = neighbors
        self._range = slice(*neighbors.chunk(flat.numel())[neighbors.rank])
        self._values = flat[self._range].clone()

    def restore(self, flat: Tensor, label: str) -> Handle:
        """Start to bring all values back into a flat tensor."""
        flat[self._range].copy_(self._values)
        return self._neighbors.all_gather(flat, label=label)


class FlatUnit:
    """One unit.

    Args:
        layout: what it holds.
        parameters: its parameters by name.
        values: gives the whole values of a parameter; called once for each, in order.
        communicator: the ranks that share it.
        device: where it lives.

    Attributes:
        slots: its parameters, in order.
        shard: 1-D, the owned range in the master's dtype: what the optimizer updates.
        flat: 1-D, all parameters in the dtype of forward; without memory while a sharded unit is
            not in use.
        whole: whether the parameters' values are there.
        guard: decides what happens when a parameter is used that is not whole.
        arrival: the all-gather under way.
        holds: how many users keep the unit whole.
        near: a copy of a part of the values, from which few neighbors can restore them.
    """

    def __init__(
        self,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        values: Callable[[str, nn.Parameter], Tensor],
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.chunk = layout.chunks[communicator.rank]
        self.communicator = communicator
        self.label = layout.key or "the rest of the model"
        self.has_master = layout.master is not layout.dtype
        self.flat = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.slots = [
            self._make_slot(place.name, parameters[place.name], place.offset)
            for place in layout.places
        ]
        separate = layout.sharded or self.has_master
        self.shard = (
            torch.empty(layout.owned(communicator.rank), dtype=layout.master, device=device)
            if separate
            else self._own_flat()
        )
        self.whole = True
        self.arrival: Handle | None = None
        self.holds = 0
        self.near: NearPart | None = None
        self.guard: Guard = self
        with torch.no_grad():
            for slot in self.slots:
                self._adopt(slot, values(slot.name, slot.parameter))
        if layout.sharded:
            self.free()  # before the next unit gets memory

    @property
    def resident(self) -> bool:
        """Whether the parameters stay whole between uses."""
        return not self.layout.sharded

    @property
    def moves(self) -> bool:
        """Whether an optimizer may have changed the parameters: not if all were always frozen."""
        return self.layout.trainable or any(slot.parameter.requires_grad for slot in self.slots)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in order."""
        return [slot.parameter for slot in self.slots]

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor when it is whole."""
        return self.layout.numel * self.layout.dtype.itemsize

    def _make_slot(self, name: str, parameter: nn.Parameter, offset: int) -> Slot:
        check_ordinary(name, parameter)
        return Slot(name, parameter, self, offset)

    def _own_flat(self) -> Tensor:
        return self.flat[self.chunk[0] : self.chunk[1]]

    def _adopt(self, slot: Slot, values: Tensor) -> None:
        """Copy a parameter's whole values in, and make the parameter a view of the unit."""
        piece = self.flat[slot.offset : slot.offset + slot.numel]
        view = piece.as_strided(slot.shape, slot.strides, piece.storage_offset())
        if self.resident:
            view.copy_(values)
        if self.shard.data_ptr() != self._own_flat().data_ptr() and slot.owned_numel:
            self.shard[slot.local()].copy_(slot.in_memory_order(values)[slice(*slot.owned)])
        if slot.parameter.is_meta:
            become(slot.parameter, view, slot.name)
        else:
            slot.parameter.data = view  # the object and all that hold it stay

    # --- the optimizer's side ---

    def fragment(self, slot: Slot) -> nn.Parameter | None:
        """Return what an optimizer holds in a parameter's place; None where nothing is owned.

        1-D, or with the parameter's shape when whole parameters belong to ranks.
        """
        if slot.fragment is None and slot.owned_numel:
            piece = self.shard[slot.local()]
            if self.layout.whole_parameters:
                piece = piece.as_strided(slot.shape, slot.strides, piece.storage_offset())
            slot.fragment = nn.Parameter(piece, requires_grad=slot.parameter.requires_grad)
        return slot.fragment

    # --- values on their way ---

    def start(self) -> None:
        """Bring the values of the other ranks; the parameters are guarded until they are there."""
        if self.layout.sharded:
            self.flat.untyped_storage().resize_(self.nbytes)
        if self.near is not None:
            self.arrival = self.near.restore(self.flat, f"parameters of {self.label}")
            self.near = None
            self.shut()
            return
        if self.layout.sharded or self.has_master:
            with torch.no_grad():
                self._own_flat().copy_(self.shard)
        if self.communicator.size == 1 and self.resident:
            self.open()
            return
        self.arrival = self.communicator.all_gather(
            self.flat, chunks=self.layout.chunks, label=f"parameters of {self.label}"
        )
        self.shut()

    def park(self) -> None:
        """Keep the values, but let nobody use the parameters without asking the guard."""
        self.arrival = Finished()
        self.shut()

    def arrive(self) -> None:
        """Wait for the values and give the parameters free."""
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None
            self.open()

    def open(self) -> None:
        """Let everybody use the parameters: the values are there."""
        self.whole = True
        for slot in self.slots:
            unguard(slot.parameter)

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Wait for the values, then do what was asked: a resident unit guards itself."""
        self.arrive()
        return function(*args, **kwargs)

    def shut(self) -> None:
        """Let nobody use the parameters without asking the guard."""
        self.whole = False
        for slot in self.slots:
            guard(slot.parameter, self.guard)

    def free(self) -> None:
        """Give the memory of a sharded unit back; its range stays in the shard.

        A gather that failed is an error for those who need the values, not here.
        """
        if self.arrival is not None:
            with suppress(CollectiveError):
                self.arrival.wait()
            self.arrival = None
        self.shut()
        self.flat.untyped_storage().resize_(0)

    def free_but_near(self, neighbors: Communicator) -> None:
        """Free a sharded unit that is whole, but keep what few neighbors can restore it from."""
        self.near = NearPart(self.flat, neighbors)
        self.free()

    def accept(self, source: int = 0) -> None:
        """Make one rank's whole values those of all ranks, and take this rank's range from them."""
        self.communicator.broadcast(
            self.flat, source, label=f"changed parameters of {self.label}"
        ).wait()
        if self.layout.sharded or self.has_master:
            # What nobody changed keeps the digits that the dtype of forward has no room for.
            own = self._own_flat()
            self.shard.copy_(torch.where(self.shard.to(own.dtype) == own, self.shard, own))


def storages(units: Sequence[FlatUnit]) -> dict[int, FlatUnit]:
    """Return units by the identity of their flat storage, which lasts as long as the unit."""
    return {unit.flat.untyped_storage()._cdata: unit for unit in units}
