"""Optimizer state that is no tensor: each rank has a share, the checkpoint has the whole."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import CheckpointError

Scalars = Mapping[int, Mapping[str, Mapping[str, Any]]]
"""Of one model: optimizer index -> parameter name -> state key -> plain value."""


def merge_scalars(ranks: Sequence[Sequence[Scalars]]) -> list[dict[Any, Any]]:
    """Join the scalars of all ranks, model by model.

    Args:
        ranks: for each rank, for each model, what it holds; where ranks overlap they must be equal.

    Raises:
        CheckpointError: ranks hold different values for the same key, or different numbers of
            models.
    """
    counts = [len(models) for models in ranks]
    if len(set(counts)) > 1:
        raise CheckpointError(f"expected the same number of models on all ranks, found {counts}")
    merged: list[dict[Any, Any]] = [{} for _ in ranks[0]]
    for rank, models in enumerate(ranks):
        for index, model in enumerate(models):
            _join(merged[index], model, rank, f"scalars[{index}]")
    return merged


def _join(into: dict[Any, Any], more: Mapping[Any, Any], rank: int, where: str) -> None:
    for key, value in more.items():
        path = f"{where}[{key!r}]"
        known = into.get(key)
        if key not in into:
            into[key] = _copy(value)
        elif isinstance(known, dict) and isinstance(value, Mapping):
            _join(known, value, rank, path)
        elif not _equal(known, value):
            raise CheckpointError(
                f"ranks disagree on {path}: rank {rank} has {value!r}, a lower rank {known!r}; "
                "optimizer state that is not sharded must be the same on all ranks"
            )


def _copy(value: Any) -> Any:
    """Copy the dicts, which later ranks add to."""
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
