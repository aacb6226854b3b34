"""The guard of freed units: uses of parameters whose values are away, and views of autograd."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import UsageError
from drivetrain.parts.guard import guard, read_only, writes
from drivetrain.parts.rounds import in_backward
from drivetrain.sharding.unit import Unit

_DETACHED = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
"""Functions that give the parameter without its history: a rank may look at its facts by itself."""


class Gathers(Protocol):
    """The gathering of units, as their guards see it."""

    @property
    def in_forward(self) -> bool:
        """Whether the model runs forward or backward now, which free at their end."""

    def bring(self, unit: Unit) -> None:
        """Return when a unit is whole."""

    def keep_views(self, unit: Unit) -> None:
        """Keep a unit until the outermost forward ends: the script has a view of its values."""

    def holding(self, units: Sequence[Unit]) -> AbstractContextManager[None]:
        """Context in which units stay whole."""

    def saving(self) -> saved_tensors_hooks:
        """Return the context in which autograd saves views of units without their values."""


def refusal(unit: Unit, *used: Any) -> UsageError:
    """Return the error for a use of values that are not there.

    Args:
        unit: the unit.
        used: arguments of the use; the error names the first of the unit's parameters in there.
    """
    return UsageError(
        f"expected a parameter with values, found {_name(unit, used)} divided over the ranks "
        "between steps: it can be read, but not changed; do that inside "
        "'with accelerator.gathered(model):' on every rank, or take "
        "accelerator.get_state_dict(model) or save_model()"
    )


def _name(unit: Unit, used: Any) -> str:
    names = {id(slot.parameter): slot.name for slot in unit.slots}
    found = (names[id(leaf)] for leaf in tree_leaves(used) if id(leaf) in names)
    return f"{next(found, unit.slots[0].name)!r} of {unit.label}"


def shares_memory(result: Any, unit: Unit) -> bool:
    """Return whether a result, or a tensor inside it, is a view of a unit's values."""
    for leaf in (result,) if type(result) is Tensor else _leaves(result):
        dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided
        if dense and leaf.untyped_storage()._cdata in unit.storages:
            return True
    return False


def _leaves(result: Any) -> Iterator[Any]:
    """Yield the parts of a result, the attributes of plain objects too."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__"):
            yield leaf
        else:
            yield from tree_leaves(list(vars(leaf).values()))


class AbsentGuard:
    """The guard of a sharded unit's parameters: a use gathers the unit, or is refused.

    Args:
        unit: the unit.
        gather: gathers and frees it.
    """

    def __init__(self, unit: Unit, gather: Gathers) -> None:
        self._unit = unit
        self._gather = gather

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Gather the unit for one use; between steps it is freed again after it.

        A forward may also write into the values: it runs on every rank, and so does its write.

        Raises:
            UsageError: a write outside of a forward, which is refused on each rank by itself.
        """
        if writes(function, args, kwargs) and (in_backward() or not self._gather.in_forward):
            raise refusal(self._unit, args, kwargs)
        if self._gather.in_forward:
            self._gather.bring(self._unit)
            result = function(*args, **kwargs)
            if shares_memory(result, self._unit):
                self._gather.keep_views(self._unit)
            return result
        if function in _DETACHED:
            return self._without_values(*args)
        with ExitStack() as stack:
            stack.enter_context(self._gather.saving())
            stack.enter_context(self._gather.holding([self._unit]))
            result = function(*args, **kwargs)
            if self._unit.changed():  # from now on forgotten: no shard follows
                raise refusal(self._unit, args, kwargs)
            return self._copied(result, args)

    def _copied(self, result: Any, used: Any) -> Any:
        """Return a result with copies in the place of views of values that are about to be freed.

        Gradients flow through a copy as through a view, as where a method beside ``forward`` reads
        some rows of a table.

        Raises:
            UsageError: the result holds more than tensors.
        """
        if not shares_memory(result, self._unit):
            return result
        if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            raise refusal(self._unit, used)  # such as a pickle, which would drag the unit along
        return tree_map(lambda leaf: self._copy(leaf, used), result)

    def _copy(self, leaf: Any, used: Any) -> Any:
        if not isinstance(leaf, Tensor) or not shares_memory(leaf, self._unit):
            return leaf
        return read_only(leaf.clone(), refusal(self._unit, used))

    def _without_values(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter for a state dict: its facts, and an error for its values."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = parameter.detach()
        guard(shown, DetachedGuard(refusal(self._unit, parameter)))
        return shown


class DetachedGuard:
    """The guard of a state dict's view of a sharded parameter: it has shape and dtype, no values.

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
    """The guard of a unit that is still divided when its strategy is taken off.

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


def without_values(
    storages: Mapping[int, Unit], bring_back: Callable[[Unit], None]
) -> saved_tensors_hooks:
    """Return the context in which autograd saves views of units without their values.

    Hooks around it, such as those of checkpoints and of offloading, go on working.

    Args:
        storages: units by the identity of their storages.
        bring_back: makes a unit whole.
    """
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = around or (None, None)

    def save(tensor: Tensor) -> Any:
        dense = tensor.layout is torch.strided  # others have no storage to ask for
        unit = storages.get(tensor.untyped_storage()._cdata) if dense else None
        # A node of the graph that kept its own output with the graph would never be freed.
        kept = tensor if unit is None and pack is not None else tensor.detach()
        return unit, tensor._version, kept if pack is None else pack(kept)

    def restore(packed: Any) -> Tensor:
        unit, version, kept = packed
        if unit is not None:
            if unpack is None and kept._version != version:  # autograd itself checks no such tensor
                raise UsageError(
                    f"expected the parameters of {unit.label} as forward has read them, found that "
                    "one was changed in place before backward: change it before its first use in "
                    "forward, or after backward"
                )
            bring_back(unit)
        values: Tensor = kept if unpack is None else unpack(kept)
        if unit is None:
            return values
        # A graph of this backward would save the view itself, without these hooks.
        return values.detach().clone() if torch.is_grad_enabled() else values

    return saved_tensors_hooks(save, restore)
