"""The placement of a model: which ranks share it, and which unit each of its parameters lies in."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator, connect
from drivetrain.compression.communicator import connect_linked, connect_replicas
from drivetrain.cost import TensorSpec
from drivetrain.errors import RankMismatchError
from drivetrain.model.deferred import fill, meta_tensors
from drivetrain.model.modules import held_parameters, named_parameters
from drivetrain.parallel.layout import ParameterSlot, UnitLayout
from drivetrain.parallel.optimizer_backend import OptimizerBackend
from drivetrain.parallel.options import UnitsOptions
from drivetrain.parallel.replicated import check_apart, replicate
from drivetrain.parallel.unit import (
    FlatParameter,
    SecondaryRanks,
    SecondaryShard,
    Unit,
    connect_secondary,
    digest,
    take_written,
)
from drivetrain.runtime.mesh import Axis
from drivetrain.shards import WeightSource
from drivetrain.strategy import Run

CutModel: TypeAlias = Callable[[Sequence[TensorSpec], Sequence[Hashable]], Sequence[UnitLayout]]
"""Cuts parameters into units, given the device of each; only equal devices share a unit."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that train a model together, and their division of the model.

    Attributes:
        everyone: all ranks that train the model on batches of their own.
        sharing: the ranks that each own a part of every unit.
        reducing: the same ranks, for gradients. Where units are gathered in backward, that is a
            communicator of its own: over gloo ranks may then finish gradients in different places
            of the order of gathers, as when a parameter has no gradient on one of them. Backends
            with one queue per group still want one order.
        replicas: the ranks that own the same parts as this one; None: no others do, and those who
            share are everyone.
        secondary: the ranks that keep values inside of hosts, besides their own; None: no rank.
    """

    everyone: Communicator
    sharing: Communicator
    reducing: Communicator
    replicas: Communicator | None = None
    secondary: SecondaryRanks | None = None

    @classmethod
    def in_one_queue(cls, run: Run) -> "Ranks":
        """Connect ``dp``: each rank owns a part, and all collectives keep one order."""
        everyone = connect_linked(run.mesh, "dp", run.traffic, run.world, run.links)
        return cls(everyone, everyone, everyone)

    @classmethod
    def in_queues(
        cls,
        run: Run,
        sharing: Axis | None = None,
        replicas: Axis | None = None,
        *,
        keeping: UnitsOptions | None = None,
    ) -> "Ranks":
        """Connect ``dp``, with queues of their own for gathers and for gradients.

        Args:
            run: its mesh.
            sharing: the ranks that share a model; None for all of ``dp``.
            replicas: the ranks that own the same parts; None where all share.
            keeping: says whether ranks keep secondary shards; None: they do not.
        """

        def connected() -> Communicator:
            return connect_linked(run.mesh, "dp", run.traffic, run.world, run.links)

        everyone = connected()
        ranks = cls(
            everyone,
            everyone if sharing is None else connect_line(run, sharing),
            connected() if sharing is None else connect_line(run, sharing),
            None
            if replicas is None
            else connect_replicas(replicas, run.traffic, run.world, run.links),
            None if keeping is None else connect_secondary(run, keeping),
        )
        for one in ranks.communicators:  # a failure of one reaches the ranks of the others
            one.accompany([other for other in ranks.communicators if other is not one])
        return ranks

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all about state that is whole everywhere."""
        return self.everyone.rank == 0

    @property
    def original(self) -> bool:
        """Whether this rank speaks for its replicas."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def summing(self) -> list[Communicator]:
        """The communicators of sums of gradients."""
        return [one for one in (self.reducing, self.replicas) if one is not None]

    @property
    def communicators(self) -> list[Communicator]:
        """All communicators, each once."""
        found = (
            *(self.secondary or ()),
            self.replicas,
            self.reducing,
            self.sharing,
            self.everyone,
        )
        return list(dict.fromkeys(one for one in found if one is not None))

    def close(self) -> None:
        """Close the communicators."""
        for communicator in self.communicators:
            communicator.close()


def connect_line(run: Run, axis: Axis) -> Communicator:
    """Connect this rank's line of an axis."""
    return connect(axis, run.traffic, run.world.device, run.world.timeout)


@dataclass(eq=False, repr=False)
class Placement:
    """The units of one model, and who lies where in them.

    Attributes:
        ranks: those that train it.
        backend: where shards lie.
        cut: cuts parameters into units.
        belongs: whether a parameter lies in a unit; one that never moves may need none.
        device: where parameters without values get theirs.
        units: in the order in which backward usually reaches them.
        slots: by parameter.
        outside: the parameters that lie in no unit, by name.
    """

    ranks: Ranks
    backend: OptimizerBackend
    cut: CutModel
    belongs: Callable[[TensorSpec], bool]
    device: torch.device
    units: list[Unit] = field(default_factory=list)
    slots: dict[nn.Parameter, ParameterSlot] = field(default_factory=dict)
    outside: dict[str, nn.Parameter] = field(default_factory=dict)
    _source: WeightSource | None = None
    _flats: dict[ParameterSlot, FlatParameter] = field(default_factory=dict)
    _units: dict[ParameterSlot, Unit] = field(default_factory=dict)
    _written: dict[Unit, Tensor] = field(default_factory=dict)
    _writes: int = 0

    def __iter__(self) -> Iterator[ParameterSlot]:
        return iter(self.slots.values())

    def flat_of(self, slot: ParameterSlot) -> FlatParameter:
        """Return the flat tensor that a parameter lies in."""
        return self._flats[slot]

    def unit_of(self, slot: ParameterSlot) -> Unit:
        """Return the unit that a parameter is gathered with."""
        return self._units[slot]

    def fragment_of(self, slot: ParameterSlot) -> nn.Parameter | None:
        """Return the fragment that optimizers hold for a parameter; None if none, or not yet."""
        return self._flats[slot].fragments.get(slot)

    # --- laying out ---

    def remember(self, model: nn.Module, source: WeightSource) -> None:
        """Keep the source of a model built on meta; fill the tensors outside of units."""
        self._source = source
        placed = {
            name
            for name, p in named_parameters(model).items()
            if self.belongs(TensorSpec.of(name, p))
        }
        fill(model, [n for n in meta_tensors(model) if n not in placed], source, self.device)

    def lay_out(self, model: nn.Module) -> list[Unit]:
        """Make the units of a model, all ranks with rank 0's values, and return them.

        Raises:
            UsageError: parameters share memory, and their copies in units would not.
        """
        check_apart({**named_parameters(model), **dict(model.named_buffers())})
        ordinary = [parameter for parameter in held_parameters(model) if not parameter.is_meta]
        replicate([*ordinary, *model.buffers()], self.ranks.everyone, "replicate model")
        self.outside = named_parameters(model)
        units = self.follow()
        self._source = None
        return units

    def follow(self) -> list[Unit]:
        """Make units of parameters that lie in none and belong into one now; return them."""
        specs = [TensorSpec.of(name, parameter) for name, parameter in self.outside.items()]
        chosen = [spec for spec in specs if self.belongs(spec)]
        if not chosen:
            return []
        devices = [self._device_of(self.outside[spec.name]) for spec in chosen]
        units = [self._make(layout) for layout in self.cut(chosen, devices)]
        for spec in chosen:
            del self.outside[spec.name]
        self.units += units
        for unit in units:
            self.slots.update({slot.parameter: slot for slot in unit.slots})
            self._flats.update({slot: flat for flat in unit.flats for slot in flat.slots})
            self._units.update(dict.fromkeys(unit.slots, unit))
        return units

    def _make(self, layout: UnitLayout) -> Unit:
        device = self._device_of(self.outside[next(iter(layout.places)).name])
        label = layout.key or "the rest of the model"
        # The shard of the only rank is all values: where nobody updates others, they stay.
        apart = self.backend.active or any(kind.master is not kind.dtype for kind in layout.flats)
        freed = layout.sharded and (apart or self.ranks.sharing.size > 1)
        flats = []
        for kind in layout.flats:
            flat = FlatParameter(kind, self.outside, self.ranks.sharing, device, sharded=freed)
            flat.shard = self.backend.shard(flat, label)
            flats.append(flat)
        ranks = self.ranks
        unit = Unit(layout, flats, ranks.sharing, self._values)
        if self._source is not None and unit.resident:
            replicate(unit.values, ranks.everyone, "replicate model")
        if ranks.secondary is not None and layout.sharded:
            unit.secondary = SecondaryShard(flats, *ranks.secondary)
            unit.secondary.refresh((), f"first parameters of {unit.label}", exact=True)
        return unit

    def _values(self, name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.is_meta and self._source is not None:
            return self._source.value(name, parameter)
        return parameter.detach()

    def _device_of(self, parameter: nn.Parameter) -> torch.device:
        return self.device if parameter.is_meta else parameter.device

    # --- all units together ---

    def take_changes(self) -> None:
        """Let masters follow what the script wrote into whole parameters since the last step.

        Tensors that it set as their data are copied here, and no earlier: an average that is
        swapped in for an evaluation, and out again, must not be written into the memory that the
        script holds meanwhile (``old = p.data``).

        Raises:
            RankMismatchError: ranks have written different values.
        """
        for unit in self.units:
            if not unit.resident:
                continue
            if replaced := unit.replaced():
                unit.take_data(replaced)
            if take_written(unit, stores=self.backend.active) or replaced:
                self.backend.values_changed(unit)
                self.note_written(unit)
        if self._written:
            self._compare_written()

    def note_written(self, unit: Unit) -> None:
        """Remember the whole values that the script, or a forward, has written."""
        self._written[unit] = torch.stack([digest(flat) for flat in unit.values]).sum(0)

    def _compare_written(self) -> None:
        """Compare what ranks have written, now and then: at the first, second, fourth step of it.

        Raises:
            RankMismatchError: it differs; each rank would keep its own part.
        """
        written, self._written = self._written, {}
        self._writes += 1
        if self._writes & (self._writes - 1) or self.ranks.everyone.size == 1:
            return
        mine = torch.stack([written[unit] for unit in self.units if unit in written]).sum(0)
        bounds = torch.stack([mine, ~mine])
        self.ranks.everyone.all_reduce(bounds, reduction="max", label="written parameters").wait()
        if bounds[0] != ~bounds[1]:
            labels = ", ".join(unit.label for unit in self.units if unit in written)
            raise RankMismatchError(
                f"expected equal parameters on all ranks, found that they have written different "
                f"values into some of {labels} since the last step: what a forward, or the script, "
                "writes is of one rank alone, such as rows of its batch (max_norm). Write the same "
                "on all ranks, the accelerator.reduce() of it for example, or let a buffer hold it"
            )

    def slots_of(self, parameters: Iterable[nn.Parameter]) -> list[ParameterSlot]:
        """Return the slots of those parameters that lie in units."""
        return [self.slots[p] for p in parameters if p in self.slots]

    def gradients(
        self, only: Collection[nn.Parameter] | None = None
    ) -> dict[ParameterSlot, Tensor]:
        """Return the gradients of this rank's fragments, of some parameters or of all."""
        found = {}
        for slot in self.slots.values() if only is None else self.slots_of(only):
            fragment = self._flats[slot].fragments.get(slot)
            if fragment is not None and fragment.grad is not None:
                found[slot] = fragment.grad
        return found

    def send_around(self, stepped: Collection[Unit], *, exact: bool = False) -> None:
        """Bring the updated ranges of other ranks to where they are kept, in the order of forward.

        Resident units keep all of them, secondary shards some. Forward needs the last unit first,
        so its all-gather is sent first; each of them goes on until the forward reaches its unit.

        Args:
            stepped: the units with updated ranges.
            exact: whether all values cross as they are, those of frozen parameters too.
        """
        for unit in reversed(self.units):
            if unit not in stepped or not (exact or unit.moves):
                continue
            if unit.resident:
                unit.wait_for_unshard()
                unit.unshard(exact=exact)
            elif unit.secondary is not None:
                label = f"new parameters of {unit.label}"
                unit.secondary.refresh(unit.updates, label, exact=exact)

    def wait_for_values(self) -> None:
        """Return when every value that is on its way is there."""
        for unit in self.units:
            unit.wait_for_unshard()
            if unit.secondary is not None:
                unit.secondary.wait()

    def wait_for_steps(self) -> None:
        """Return when this rank's shards have been stepped."""
        for unit in self.units:
            unit.wait_for_step()


# --- edits: a script changes whole parameters, and what rank 0 changed becomes everybody's ---


@contextmanager
def edits_accepted(
    units: Sequence[Unit], communicator: Communicator, backend: OptimizerBackend
) -> Iterator[None]:
    """Context in which whole parameters may be changed, on all ranks alike or on rank 0 alone.

    Changes are found by comparing digests, so it does not matter how they were made.

    Args:
        units: whole inside of the context.
        communicator: all ranks that train the model.
        backend: where masters lie that follow.
    """
    set_before = [_replaced(unit) for unit in units]
    before = [_digests(unit) for unit in units]
    yield
    for unit, old in zip(units, set_before, strict=True):
        new = _replaced(unit)
        if fresh := [slot for slot in new if new[slot] != old.get(slot)]:
            unit.take_data(fresh)
    after = [_digests(unit) for unit in units]
    changed = [old != new for old, new in zip(before, after, strict=True)]
    if not units:
        return
    flags = torch.tensor(changed, dtype=torch.uint8, device=units[0].values[0].device)
    communicator.all_reduce(flags, reduction="max", label="changed parameters").wait()
    for unit, flag in zip(units, flags.tolist(), strict=True):
        if flag:
            unit.accept(communicator)
            backend.values_changed(unit)


def _digests(unit: Unit) -> list[int]:
    return [int(digest(flat)) for flat in unit.values]


def _replaced(unit: Unit) -> dict[ParameterSlot, int]:
    """Return the digests of data that the script has set on the unit's parameters."""
    found = {slot: slot.parameter.data.flatten().clone() for slot in unit.replaced()}
    return {slot: int(digest(values)) for slot, values in found.items()}
