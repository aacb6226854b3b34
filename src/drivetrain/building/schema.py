"""Which tensors an operator writes and makes, and whether values are needed: by its schema."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.parts.guard import Arguments, Keywords

Operator: TypeAlias = OpOverload[..., Any]

LOCAL = frozenset({"aten", "prims"})
"""Namespaces whose operators compute and do nothing else."""

COMMUNICATING = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces whose operators talk to other ranks."""

_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in ("bernoulli", "copy", "exponential", "fill", "normal", "random", "uniform", "zero")
)
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_META = torch.device("meta")


def overwriting(function: Operator) -> bool:
    """Return whether an operator writes all of its first argument without reading it."""
    return function._schema.name in _OVERWRITING


def written(function: Operator, args: Arguments, kwargs: Keywords) -> list[Tensor]:
    """Return the tensors among the arguments that a call writes."""
    found: list[Tensor] = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [v for v in tree_leaves(value) if isinstance(v, Tensor)]
    return found


def is_view(function: Operator) -> bool:
    """Return whether a call makes or changes geometry alone, and touches no memory."""
    if torch.Tag.inplace_view in function.tags:
        return function._schema.name != "aten::resize_"
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in _arguments(function))
    results = function._schema.returns
    return bool(results) and not writes and all(r.alias_info is not None for r in results)


def makes_tensors(function: Operator) -> bool:
    """Return whether a call returns tensors that are not among its arguments."""
    results = function._schema.returns
    return any(r.alias_info is None and "Tensor" in str(r.type) for r in results)


def needs_values(function: Operator) -> bool:
    """Return whether the result of a call, or its shape, depends on values."""
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in _arguments(function))
    return bool(_VALUES & set(function.tags)) or not (writes or makes_tensors(function))


def on_meta(function: Operator, args: Arguments, kwargs: Keywords) -> Any:
    """Call an operator for the shapes of its results, on the meta device."""
    named = tree_map(_without_values, dict(kwargs))
    if any(argument.name == "device" for argument in _arguments(function)):
        named["device"] = _META
    if named.get("pin_memory"):
        named["pin_memory"] = False
    return function(*tree_map(_without_values, tuple(args)), **named)


def _arguments(function: Operator) -> Sequence[Any]:
    arguments: Sequence[Any] = function._schema.arguments
    return arguments


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return value
