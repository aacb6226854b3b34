"""One unit on one rank: parameters that are gathered and freed together, by one all-gather.

A resident unit keeps its parameters whole: an all-gather in place brings the other ranks' updates.
A sharded unit keeps only this rank's shards; its flat tensors get memory before use and lose it
after. The parameter objects and their views stay, so autograd's saved views are valid again then.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.building import become
from drivetrain.collectives import Communicator, Handle
from drivetrain.collectives.handles import Finished
from drivetrain.errors import CollectiveError, StorageError, UsageError
from drivetrain.heap import offer
from drivetrain.parts.guard import Guard, check_ordinary, guard, unguard
from drivetrain.sharding.layout import FlatLayout, UnitLayout
from drivetrain.sharding.near import NearPart
from drivetrain.sharding.shard import ShardHome, ShardInPlace, make_placeholder
from drivetrain.sharding.slot import ParameterSlot
from drivetrain.store import Pending

WholeValues = Callable[[str, nn.Parameter], Tensor]
"""Gives the whole values of a parameter; called once for each, in order."""


class FlatTensor:
    """The parameters of one kind in a unit, side by side in one tensor; and this rank's shard.

    Args:
        layout: which parameters it holds.
        sharded: whether its values are freed between uses.
        parameters: parameters by name.
        rank: this rank among those that share the unit.
        device: where it lives.

    Attributes:
        layout: which parameters it holds.
        sharded: whether its values are freed between uses.
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
    ) -> None:
        self.layout = layout
        self.sharded = sharded
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
        if self.sharded:
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


class Unit:
    """Parameters that are gathered and freed together.

    Args:
        layout: which parameters it holds, and who owns what of them.
        flats: its flat tensors, one for each kind.
        communicator: the ranks that share it.
        values: gives the whole values of a parameter.

    Attributes:
        layout: which parameters it holds, and who owns what of them.
        flats: its parameters by kind.
        slots: its parameters, in order.
        parameters: the user's own objects, in order.
        values: the flat tensors, each 1-D.
        communicator: the ranks that share it.
        label: names it in errors.
        resident: whether the parameters stay whole between uses.
        whole: whether the parameters' values are there.
        absent: decides what happens when a parameter is used that is not whole.
        arrival: the all-gather under way.
        updates: steps of this rank's shards that are under way.
        holds: how many users keep the unit whole.
        near: a copy of a part of the values, from which few neighbors can restore them.
        storages: the identities of the values' storages, which last as long as the unit.
    """

    def __init__(
        self,
        layout: UnitLayout,
        flats: Sequence[FlatTensor],
        communicator: Communicator,
        values: WholeValues,
    ) -> None:
        self.layout = layout
        self.flats = flats
        self.communicator = communicator
        self.label = layout.key or "the rest of the model"
        self.slots = [slot for flat in flats for slot in flat.slots]
        self.parameters = [slot.parameter for slot in self.slots]
        self.values = [flat.values for flat in flats]
        self.resident = not layout.sharded
        self.whole = True
        self.arrival: Handle | None = None
        self.updates: list[Pending] = []
        self.holds = 0
        self.near: NearPart | None = None
        self.absent: Guard = self
        self._guarded_by: Guard | None = None
        self._versions: list[int] | None = None
        self.storages = {flat.untyped_storage()._cdata for flat in self.values}
        self._memory = [(flat.values.untyped_storage(), flat.layout.nbytes) for flat in flats]
        self._parts: list[list[Tensor]] = [[] for _ in range(communicator.size)]
        for flat in flats:
            flat.add_parts(flat.values, self._parts)
        with torch.no_grad():
            for flat in flats:
                flat.adopt(values)
        if layout.sharded:
            self.free()  # before the next unit gets memory

    @property
    def live(self) -> bool:
        """Whether the values are there or on their way."""
        return self.whole or self.arrival is not None

    @property
    def moves(self) -> bool:
        """Whether an optimizer may have changed the parameters: not if all were always frozen."""
        trained = any(parameter.requires_grad for parameter in self.parameters)
        return trained or bool(self.layout.trainable)

    @property
    def live_bytes(self) -> int:
        """Bytes of memory that the flat tensors have now."""
        return sum(memory.nbytes() for memory, _ in self._memory)

    # --- values on their way ---

    def start(self) -> None:
        """Send the all-gather; the parameters are guarded until their values are there.

        Where few neighbors hold the values together, they restore them. A shard that is being
        stepped, or lies in a store, is waited for in the background, just before it is sent.
        """
        if self.layout.sharded:
            for memory, nbytes in self._memory:
                memory.resize_(nbytes)
        label = f"parameters of {self.label}"
        if self.near is not None:
            self.arrival = self.near.restore(label)
            self.near = None
            self.guard()
            return
        first = None if self._at_hand() else partial(self._fill_own, tuple(self.updates))
        if first is None:
            self._fill_own()
        if self.communicator.size == 1 and self.resident and first is None:
            self.unguard()
            return
        self.arrival = self.communicator.gather_parts(self._parts, label=label, first=first)
        self.guard()

    def _at_hand(self) -> bool:
        """Return whether this rank's shards are there; start to fetch shards from a store."""
        if self.updates:
            return False
        away = [flat.shard for flat in self.flats if not flat.shard.at_hand]
        for shard in away:
            shard.ahead()
        return not away

    def _fill_own(self, after: Sequence[Pending] = ()) -> None:
        for update in after:
            update.wait()
        for flat in self.flats:
            flat.shard.fill()

    def wait_for_step(self) -> None:
        """Return when this rank's shards have been stepped.

        Raises:
            StorageError: the store could not.
        """
        for update in self.updates:
            update.wait()
        self.updates = []

    def wait_for_values(self) -> None:
        """Return when the values are there, with the parameters unguarded.

        Raises:
            StorageError: this rank's store failed.
            CollectiveError: another rank did, or the connection to it.
        """
        if self.arrival is not None:
            if self.updates:
                self.wait_for_step()  # its own error, not that of the operation that waits for it
            try:
                self.arrival.wait()
            except CollectiveError as error:
                if isinstance(error.__cause__, StorageError):  # what this rank was to send
                    raise error.__cause__ from None
                raise
            self.arrival = None
            self.unguard()

    def park(self) -> None:
        """Keep the values, but let nobody use the parameters without asking the guard."""
        self.arrival = Finished()
        self.guard()

    def guard(self) -> None:
        """Let nobody use the parameters without asking the guard."""
        self.whole = False
        if self._guarded_by is not self.absent:
            for parameter in self.parameters:
                guard(parameter, self.absent)
            self._guarded_by = self.absent

    def unguard(self) -> None:
        """Let everybody use the parameters: their values are there."""
        self.whole = True
        self._guarded_by = None
        for parameter in self.parameters:
            unguard(parameter)
        if self._versions is None:
            self._versions = [parameter._version for parameter in self.parameters]

    def changed(self) -> bool:
        """Whether the script has written into parameters since their values came, or since asked.

        What the library writes goes to the flat tensors, and changes no version of a parameter.
        """
        if self._versions is None:
            return False
        before, self._versions = self._versions, [p._version for p in self.parameters]
        return before != self._versions

    def replaced(self) -> list[ParameterSlot]:
        """Return the parameters of a whole unit that the script gave other memory (``p.data =``).

        A guarded parameter has none: a guard brings the values before the script can set them.
        """
        found = self.slots if self.whole else []
        return [s for s in found if s.parameter.untyped_storage()._cdata not in self.storages]

    def take_data(self, replaced: Collection[ParameterSlot]) -> None:
        """Copy in data that the script has set on parameters; another shape or dtype is refused."""
        self.wait_for_step()
        with torch.no_grad():
            for flat in self.flats:
                for slot in replaced:
                    if slot in flat.slots:
                        flat.take_data(slot)
                flat.shard.take()

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Wait for the values, then handle the use: a resident unit guards itself."""
        self.wait_for_values()
        return function(*args, **kwargs)

    def free(self) -> None:
        """Give the memory of a sharded unit back; its shards stay.

        A gather that failed is an error for those who need the values, not here.
        """
        if self.arrival is not None:
            # The communication thread may still be writing into the memory that is about to go.
            with suppress(CollectiveError, StorageError):
                self.arrival.wait()
            self.arrival = None
        self.guard()
        self._versions = None
        for memory, _ in self._memory:
            offer(memory)
            memory.resize_(0)

    def free_but_near(self, neighbors: Communicator) -> None:
        """Free a whole unit, but keep parts from which a few neighbors can restore the unit."""
        self.near = NearPart(self.values, neighbors)
        self.free()

    def accept(self, everyone: Communicator, source: int = 0) -> None:
        """Make one rank's whole values those of all ranks, and this rank's shards follow."""
        for flat in self.flats:
            label = f"changed parameters of {self.label}"
            everyone.broadcast(flat.values, source, label=label).wait()
        for parameter in self.parameters:  # on every rank, for what autograd has saved
            torch.autograd.graph.increment_version(parameter)
        self.keep_changes()
        self._versions = [parameter._version for parameter in self.parameters]

    def keep_changes(self) -> None:
        """Let this rank's shards follow the values, without a rounding where none changed."""
        self.wait_for_step()
        with torch.no_grad():
            for flat in self.flats:
                flat.shard.take()
