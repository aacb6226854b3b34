"""Puts a model's parameters into units, also those that begin to train later."""

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from drivetrain.cost import TensorSpec
from drivetrain.parts.collectives import Communicator
from drivetrain.parts.deferred import WeightSource, fill, meta_tensors
from drivetrain.parts.naming import named_parameters
from drivetrain.parts.overlap import check_apart
from drivetrain.parts.replicate import replicate
from drivetrain.runtime.precision import Precision
from drivetrain_zero.layout import Cut, UnitLayout, plan
from drivetrain_zero.unit import FlatUnit, Slot


class Placement:
    """The units of one model.

    Args:
        communicator: the ranks that share them.
        precision: which dtypes parameters get.
        cut: how large units are.
        belongs: whether a parameter lies in a unit; what never moves may need none.
        device: where parameters without values get theirs.

    Attributes:
        units: in the order in which backward usually reaches them.
        slots: by parameter.
    """

    def __init__(
        self,
        communicator: Communicator,
        precision: Precision,
        cut: Cut,
        belongs: Callable[[TensorSpec], bool],
        device: torch.device,
    ) -> None:
        self.units: list[FlatUnit] = []
        self.slots: dict[nn.Parameter, Slot] = {}
        self._communicator = communicator
        self._precision = precision
        self._cut = cut
        self._belongs = belongs
        self._device = device
        self._source: WeightSource | None = None
        self._outside: dict[str, nn.Parameter] = {}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots.values())

    def remember(self, model: nn.Module, source: WeightSource) -> None:
        """Keep the source of a model built on meta; fill what lies in no unit."""
        self._source = source
        placed = {
            name for name, p in named_parameters(model).items() if self._belongs(_spec(name, p))
        }
        fill(model, [n for n in meta_tensors(model) if n not in placed], source, self._device)

    def lay_out(self, model: nn.Module) -> list[FlatUnit]:
        """Make the units of a model, all ranks with rank 0's values, and return them.

        Raises:
            UsageError: parameters share memory, and their copies in units would not.
        """
        check_apart({**named_parameters(model), **dict(model.named_buffers())})
        ordinary = [parameter for parameter in model.parameters() if not parameter.is_meta]
        replicate([*ordinary, *model.buffers()], self._communicator, "replicate model")
        self._outside = named_parameters(model)
        units = self.follow()
        self._source = None
        return units

    def follow(self) -> list[FlatUnit]:
        """Make units of parameters that lie in none and belong into one now; return them."""
        specs = [_spec(name, parameter) for name, parameter in self._outside.items()]
        chosen = [spec for spec in specs if self._belongs(spec)]
        if not chosen:
            return []
        devices = [self._device_of(self._outside[spec.name]) for spec in chosen]
        layouts = plan(chosen, self._precision, self._cut, self._communicator.size, devices)
        units = [self._make(layout) for layout in layouts]
        for spec in chosen:
            del self._outside[spec.name]
        self.units += units
        self.slots.update({slot.parameter: slot for unit in units for slot in unit.slots})
        return units

    def units_of(self, parameters: Iterable[nn.Parameter]) -> list[FlatUnit]:
        """Return the units of parameters, in order."""
        wanted = {self.slots[one].unit for one in parameters if one in self.slots}
        return [unit for unit in self.units if unit in wanted]

    def fragment_names(self) -> dict[int, str]:
        """Return the parameter's name of every fragment, by identity."""
        return {id(slot.fragment): slot.name for slot in self if slot.fragment is not None}

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield the gradients of this rank's fragments, of some parameters or of all."""
        chosen = self.slots.values() if only is None else [self.slots.get(p) for p in only]
        for slot in chosen:
            if slot is not None and slot.fragment is not None and slot.fragment.grad is not None:
                yield slot.fragment.grad

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Clear the fragments' gradients."""
        for slot in self:
            if slot.fragment is None or slot.fragment.grad is None:
                continue
            if set_to_none:
                slot.fragment.grad = None
            else:
                slot.fragment.grad.zero_()

    def _make(self, layout: UnitLayout) -> FlatUnit:
        device = self._device_of(self._outside[layout.places[0].name])
        unit = FlatUnit(layout, self._outside, self._values, self._communicator, device)
        if self._source is not None and unit.resident:
            replicate([unit.flat], self._communicator, "replicate model")
        return unit

    def _values(self, name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.is_meta and self._source is not None:
            return self._source.value(name, parameter)
        return parameter.detach()

    def _device_of(self, parameter: nn.Parameter) -> torch.device:
        return self._device if parameter.is_meta else parameter.device


def _spec(name: str, parameter: nn.Parameter) -> TensorSpec:
    return TensorSpec(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
