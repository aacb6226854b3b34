"""What happens when a parameter of a sharded unit is used while its values are away."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.errors import UsageError
from drivetrain.parts.guard import guard, writes
from drivetrain.sharding.unit import Unit

if TYPE_CHECKING:
    from drivetrain.sharding.gathering import Gatherer

_DETACHED = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
"""What gives the parameter without its history; one rank may look at its facts by itself."""


def refusal(unit: Unit, *used: Any) -> UsageError:
    """Return the error for a use of values that are not there.

    Args:
        unit: the unit.
        used: arguments of the use; the error names the first of the unit's parameters in there.
    """
    return UsageError(
        f"expected a parameter with values, found {_name(unit, used)} divided over the ranks "
        "between steps: it can be read, but neither changed nor kept as a view; do that inside "
        "'with accelerator.gathered(model):' on every rank, or take "
        "accelerator.get_state_dict(model) or save_model()"
    )


def _name(unit: Unit, used: Any) -> str:
    names = {id(slot.parameter): slot.name for slot in unit.slots}
    found = (names[id(leaf)] for leaf in tree_leaves(used) if id(leaf) in names)
    return f"{next(found, unit.slots[0].name)!r} of {unit.label}"


def shares_memory(result: Any, unit: Unit) -> bool:
    """Return whether a result, or a tensor inside it, is a view of a unit's values."""
    storages = {flat.untyped_storage()._cdata for flat in unit.values}
    return any(
        isinstance(leaf, Tensor)
        and leaf.layout is torch.strided
        and leaf.untyped_storage()._cdata in storages
        for leaf in _leaves(result)
    )


def _leaves(result: Any) -> Iterator[Any]:
    """Yield what a result consists of, the attributes of plain objects too."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__"):
            yield leaf
        else:
            yield from tree_leaves(list(vars(leaf).values()))


class AbsentGuard:
    """Guards the parameters of a sharded unit.

    Args:
        unit: the unit.
        gatherer: gathers and frees it.
    """

    def __init__(self, unit: Unit, gatherer: "Gatherer") -> None:
        self._unit = unit
        self._gatherer = gatherer

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Gather the unit for one use; between steps it is freed again after it.

        Raises:
            UsageError: a use that would write into the values, which is refused on each rank by
                itself, or between steps would keep a view.
        """
        if writes(function, args, kwargs):
            raise refusal(self._unit, args, kwargs)
        if self._gatherer.in_forward:
            self._gatherer.fetch(self._unit)
            result = function(*args, **kwargs)
            if shares_memory(result, self._unit):
                self._gatherer.keep_views(self._unit)
            return result
        if function in _DETACHED:
            return self._without_values(*args)
        with ExitStack() as stack:
            stack.enter_context(self._gatherer.saving())
            stack.enter_context(self._gatherer.holding([self._unit]))
            before = [parameter._version for parameter in self._unit.parameters]
            result = function(*args, **kwargs)
            changed = before != [parameter._version for parameter in self._unit.parameters]
            if changed or shares_memory(result, self._unit):
                raise refusal(self._unit, args, kwargs)
            return result

    def _without_values(self, parameter: nn.Parameter) -> Tensor:
        """Return what a state dict shows of a parameter: its facts, and an error for its values."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = parameter.detach()
        guard(shown, DetachedGuard(refusal(self._unit, parameter)))
        return shown


class DetachedGuard:
    """Guards what a state dict shows of a sharded parameter: shape and dtype, no values.

    Args:
        refusal: raised for every other use.
    """

    def __init__(self, refusal: UsageError) -> None:
        self._refusal = refusal

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise self._refusal


class LeftGuard:
    """Guards the parameters of a unit that is still divided when its strategy is taken off.

    Args:
        unit: the unit.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"expected a parameter with values, found {_name(self._unit, (args, kwargs))}, which "
            "was divided over the ranks, or lay in a store, when its strategy was taken off, as by "
            "free_memory(); "
            "take accelerator.get_state_dict(model) or save_model() before"
        )
