"""One unit on one rank: parameters that are gathered and freed together, by one all-gather.

A resident unit keeps its parameters whole: an all-gather in place brings what the other ranks
updated. A sharded unit keeps only what this rank owns; its flat tensors get memory before use and
lose it after. The parameter objects and their views stay the same throughout, so what autograd
saved is valid again as soon as the values are.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator, Handle
from drivetrain.collectives.solo import Finished
from drivetrain.errors import CollectiveError, StorageError
from drivetrain.parts.guard import Guard, guard, unguard
from drivetrain.sharding.flat import Flat, Values
from drivetrain.sharding.kept import take_master
from drivetrain.sharding.layout import UnitLayout
from drivetrain.sharding.slot import Slot
from drivetrain.store import Pending, TensorStore


class NearPart:
    """One rank's part of a unit's values that its neighbors hold together.

    Args:
        values: the flat tensors, each 1-D; this rank's part of each is copied.
        neighbors: the ranks that hold a part each.
    """

    def __init__(self, values: Sequence[Tensor], neighbors: Communicator) -> None:
        self._neighbors = neighbors
        self._parts = [
            [flat[slice(*neighbors.chunk(flat.numel())[rank])] for flat in values]
            for rank in range(neighbors.size)
        ]
        self._kept = [part.clone() for part in self._parts[neighbors.rank]]

    def restore(self, label: str) -> Handle:
        """Start to bring all values back into the flat tensors."""
        with torch.no_grad():
            torch._foreach_copy_(self._parts[self._neighbors.rank], self._kept)
        return self._neighbors.gather_parts(self._parts, label=label)


class Unit:
    """One unit.

    Args:
        layout: what it holds.
        parameters: its parameters by name.
        values: gives the whole values of a parameter.
        communicator: the ranks that share it.
        device: where it lives.
        store: where this rank's share lies between uses, if the unit is sharded; None: in memory.

    Attributes:
        layout: what it holds.
        flats: its parameters by kind.
        slots: its parameters, in order.
        communicator: the ranks that share it.
        label: names it in errors.
        whole: whether the parameters' values are there.
        guard: decides what happens when a parameter is used that is not whole.
        arrival: the all-gather under way.
        updates: steps of what this rank owns that are under way.
        holds: how many users keep the unit whole.
        near: a copy of a part of the values, from which few neighbors can restore them.
    """

    def __init__(
        self,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        values: Values,
        communicator: Communicator,
        device: torch.device,
        store: TensorStore | None = None,
    ) -> None:
        self.layout = layout
        self.communicator = communicator
        self.label = layout.key or "the rest of the model"
        self.whole = True
        self.arrival: Handle | None = None
        self.updates: list[Pending] = []
        self.holds = 0
        self.near: NearPart | None = None
        self.guard: Guard = self
        rank = communicator.rank
        self.flats = [Flat(flat, self, parameters, rank, device, store) for flat in layout.flats]
        self.slots: list[Slot] = [slot for flat in self.flats for slot in flat.slots]
        self._parts = [
            [part for flat in self.flats for part in flat.parts[other]]
            for other in range(communicator.size)
        ]
        with torch.no_grad():
            for flat in self.flats:
                flat.adopt(values)
        if layout.sharded:
            self.free()  # before the next unit gets memory

    @property
    def resident(self) -> bool:
        """Whether the parameters stay whole between uses."""
        return not self.layout.sharded

    @property
    def live(self) -> bool:
        """Whether the values are there or on their way."""
        return self.whole or self.arrival is not None

    @property
    def moves(self) -> bool:
        """Whether an optimizer may have changed the parameters: not if all were always frozen."""
        trained = any(slot.parameter.requires_grad for slot in self.slots)
        return trained or bool(self.layout.trainable)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in order."""
        return [slot.parameter for slot in self.slots]

    @property
    def values(self) -> list[Tensor]:
        """The flat tensors, each 1-D."""
        return [flat.values for flat in self.flats]

    @property
    def live_bytes(self) -> int:
        """Bytes of memory that the flat tensors have now."""
        return sum(flat.untyped_storage().nbytes() for flat in self.values)

    # --- values on their way ---

    def start(self) -> None:
        """Bring the values of the other ranks; the parameters are guarded until they are there."""
        if self.layout.sharded:
            for flat in self.flats:
                flat.values.untyped_storage().resize_(flat.layout.nbytes)
        label = f"parameters of {self.label}"
        if self.near is not None:
            self.arrival = self.near.restore(label)
            self.near = None
            self.shut()
            return
        first = None if self._at_hand() else partial(self._fill_own, tuple(self.updates))
        if first is None:
            self._fill_own()
        if self.communicator.size == 1 and self.resident and first is None:
            self.open()
            return
        self.arrival = self.communicator.gather_parts(self._parts, label=label, first=first)
        self.shut()

    def _at_hand(self) -> bool:
        """Return whether this rank's share is there; if it lies in a store, let that begin."""
        if self.updates:
            return False
        for flat in self.flats:
            flat.share.ahead()
        return all(flat.share.at_hand for flat in self.flats)

    def _fill_own(self, after: Sequence[Pending] = ()) -> None:
        for update in after:
            update.wait()
        for flat in self.flats:
            flat.share.fill()

    def settle(self) -> None:
        """Return when what this rank owns has been stepped.

        Raises:
            StorageError: the store could not.
        """
        for update in self.updates:
            update.wait()
        self.updates = []

    def park(self) -> None:
        """Keep the values, but let nobody use the parameters without asking the guard."""
        self.arrival = Finished()
        self.shut()

    def arrive(self) -> None:
        """Wait for the values and give the parameters free.

        Raises:
            StorageError: this rank's store failed.
            CollectiveError: another rank did, or the connection to it.
        """
        if self.arrival is not None:
            self.settle()  # its own error, not that of the operation that waits for it
            try:
                self.arrival.wait()
            except CollectiveError as error:
                if isinstance(error.__cause__, StorageError):  # what this rank was to send
                    raise error.__cause__ from None
                raise
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
        """Give the memory of a sharded unit back; its shards stay.

        A gather that failed is an error for those who need the values, not here.
        """
        if self.arrival is not None:
            with suppress(CollectiveError, StorageError):
                self.arrival.wait()
            self.arrival = None
        self.shut()
        for flat in self.flats:
            flat.values.untyped_storage().resize_(0)

    def free_but_near(self, neighbors: Communicator) -> None:
        """Free a sharded unit that is whole, but keep what few neighbors can restore it from."""
        self.near = NearPart(self.values, neighbors)
        self.free()

    def accept(self, everyone: Communicator, source: int = 0) -> None:
        """Make one rank's whole values those of all ranks, and take this rank's part from them."""
        for flat in self.flats:
            label = f"changed parameters of {self.label}"
            everyone.broadcast(flat.values, source, label=label).wait()
            flat.share.take()
            for slot in flat.slots:
                take_master(slot)


def storages(units: Sequence[Unit]) -> dict[int, Unit]:
    """Return units by the identity of their flat storages, which last as long as the units."""
    return {flat.untyped_storage()._cdata: unit for unit in units for flat in unit.values}
