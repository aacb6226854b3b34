"""Which rows of which parameter each rank owns: units of whole modules, cut row by row."""

from collections.abc import Hashable, Sequence

from drivetrain.cost import TensorSpec
from drivetrain.runtime.precision import Precision
from drivetrain.sharding.layout import UnitLayout, arrange, kind_of


def plan(
    specs: Sequence[TensorSpec],
    keys: Sequence[str],
    precision: Precision,
    size: int,
    devices: Sequence[Hashable] | None = None,
) -> list[UnitLayout]:
    """Cut parameters into units, in the order in which backward usually reaches them.

    Args:
        specs: the parameters in registration order.
        keys: the unit of each.
        precision: which dtypes they get.
        size: number of ranks that share them.
        devices: device of each parameter; only equal ones share a unit.
    """
    units: dict[tuple[str, Hashable], dict[Hashable, list[int]]] = {}
    for index, key in enumerate(keys):
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
