"""Which rows of which parameter each rank owns: units of whole modules, cut row by row."""

from collections.abc import Hashable, Sequence

from torch import nn

from drivetrain.cost import TensorSpec
from drivetrain.parts.units.layout import UnitLayout, arrange, kind_of
from drivetrain.runtime.precision import Precision
from drivetrain_fsdp.units import UnitChoice, unit_keys


def plan(
    specs: Sequence[TensorSpec],
    precision: Precision,
    choice: UnitChoice,
    size: int,
    model: nn.Module | None = None,
    devices: Sequence[Hashable] | None = None,
) -> list[UnitLayout]:
    """Cut parameters into units, in the order in which backward usually reaches them.

    Args:
        specs: the parameters in registration order.
        precision: which dtypes they get.
        choice: how units are chosen.
        size: number of ranks that share them.
        model: the model, where it is there.
        devices: device of each parameter; only equal ones share a unit.

    Raises:
        UsageError: the choice does not fit the model.
    """
    units: dict[tuple[str, Hashable], dict[Hashable, list[int]]] = {}
    for index, key in enumerate(unit_keys(specs, choice, model)):
        device = None if devices is None else devices[index]
        kinds = units.setdefault((key, device), {})
        kinds.setdefault(kind_of(specs[index], precision), []).append(index)
    layouts = []
    for (key, _), kinds in units.items():
        flats = [
            arrange([specs[index] for index in members], precision, size, "rows")
            for members in kinds.values()
        ]
        first = min(members[0] for members in kinds.values())
        layouts.append((first, UnitLayout(key, tuple(flats), sharded=True)))
    # The unit whose earliest parameter comes last is complete first.
    return [unit for _, unit in sorted(layouts, key=lambda pair: -pair[0])]
