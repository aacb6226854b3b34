"""Puts a model's parameters into units, also those that begin to train later."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from drivetrain.building import WeightSource, fill, meta_tensors
from drivetrain.cost import TensorSpec
from drivetrain.parts.naming import named_parameters
from drivetrain.parts.overlap import check_apart
from drivetrain.parts.replicate import replicate
from drivetrain.sharding.layout import UnitLayout
from drivetrain.sharding.ranks import Ranks
from drivetrain.sharding.slot import Slot
from drivetrain.sharding.unit import Unit
from drivetrain.store import TensorStore

Plan: TypeAlias = Callable[[Sequence[TensorSpec], Sequence[Hashable]], Sequence[UnitLayout]]
"""Cuts parameters into units, given the device of each; only equal devices share a unit."""


class Placement:
    """The units of one model.

    Args:
        ranks: those that train it.
        plan: cuts parameters into units.
        belongs: whether a parameter lies in a unit; what never moves may need none.
        device: where parameters without values get theirs.
        store: gives the store of this rank's shares of sharded units; None: memory.

    Attributes:
        units: in the order in which backward usually reaches them.
        slots: by parameter.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: Plan,
        belongs: Callable[[TensorSpec], bool],
        device: torch.device,
        store: Callable[[], TensorStore | None] = lambda: None,
    ) -> None:
        self.units: list[Unit] = []
        self.slots: dict[nn.Parameter, Slot] = {}
        self._ranks = ranks
        self._plan = plan
        self._belongs = belongs
        self._device = device
        self._store = store
        self._source: WeightSource | None = None
        self._outside: dict[str, nn.Parameter] = {}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots.values())

    def remember(self, model: nn.Module, source: WeightSource) -> None:
        """Keep the source of a model built on meta; fill what lies in no unit."""
        self._source = source
        placed = {
            name
            for name, p in named_parameters(model).items()
            if self._belongs(TensorSpec.of(name, p))
        }
        fill(model, [n for n in meta_tensors(model) if n not in placed], source, self._device)

    def lay_out(self, model: nn.Module) -> list[Unit]:
        """Make the units of a model, all ranks with rank 0's values, and return them.

        Raises:
            UsageError: parameters share memory, and their copies in units would not.
        """
        check_apart({**named_parameters(model), **dict(model.named_buffers())})
        ordinary = [parameter for parameter in model.parameters() if not parameter.is_meta]
        replicate([*ordinary, *model.buffers()], self._ranks.everyone, "replicate model")
        self._outside = named_parameters(model)
        units = self.follow()
        self._source = None
        return units

    def follow(self) -> list[Unit]:
        """Make units of parameters that lie in none and belong into one now; return them."""
        specs = [TensorSpec.of(name, parameter) for name, parameter in self._outside.items()]
        chosen = [spec for spec in specs if self._belongs(spec)]
        if not chosen:
            return []
        devices = [self._device_of(self._outside[spec.name]) for spec in chosen]
        units = [self._make(layout) for layout in self._plan(chosen, devices)]
        for spec in chosen:
            del self._outside[spec.name]
        self.units += units
        self.slots.update({slot.parameter: slot for unit in units for slot in unit.slots})
        return units

    def units_of(self, parameters: Iterable[nn.Parameter]) -> list[Unit]:
        """Return the units of parameters, in order."""
        wanted = {self.slots[one].unit for one in parameters if one in self.slots}
        return [unit for unit in self.units if unit in wanted]

    def gradients(
        self, only: Collection[nn.Parameter] | None = None
    ) -> Iterator[tuple[Slot, Tensor]]:
        """Yield the gradients of this rank's fragments, of some parameters or of all."""
        chosen = self.slots.values() if only is None else [self.slots.get(p) for p in only]
        for slot in chosen:
            if slot is not None and slot.fragment is not None and slot.fragment.grad is not None:
                yield slot, slot.fragment.grad

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Clear the fragments' gradients."""
        for slot in self:
            if slot.fragment is None or slot.fragment.grad is None:
                continue
            if set_to_none:
                slot.fragment.grad = None
            else:
                slot.fragment.grad.zero_()

    def send_around(self, stepped: Collection[Unit]) -> None:
        """Bring what other ranks stepped into units that stay whole, in the order of forward."""
        for unit in reversed(self.units):
            if unit.resident and unit in stepped and unit.moves:
                unit.arrive()
                unit.start()

    def _make(self, layout: UnitLayout) -> Unit:
        first = next(iter(layout.places))
        device = self._device_of(self._outside[first.name])
        unit = Unit(layout, self._outside, self._values, self._ranks.sharing, device, self._store())
        if self._source is not None and unit.resident:
            replicate(unit.values, self._ranks.everyone, "replicate model")
        return unit

    def _values(self, name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.is_meta and self._source is not None:
            return self._source.value(name, parameter)
        return parameter.detach()

    def _device_of(self, parameter: nn.Parameter) -> torch.device:
        return self._device if parameter.is_meta else parameter.device
