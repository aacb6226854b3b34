"""Cuts a model's inputs into micro-batches along dim 0, and joins their outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from drivetrain.errors import UsageError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of one pass through the pipeline, and the targets for a loss function.

    The number is that of this forward of the model, counted over all calls, also for its dropouts.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int
    targets: Any = None
    number: int = 0


def cut_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], count: int, targets: Any = None
) -> list[MicroBatch]:
    """Return at most ``count`` micro-batches, of as even a number of rows as can be.

    The rows are those of the first tensor. Every tensor of as many rows is cut, targets too; other
    inputs go with each micro-batch.

    Raises:
        UsageError: there is no tensor with rows, or the batch is empty.
    """
    leaves, tree = tree_flatten((tuple(args), dict(kwargs), targets))
    rows = next((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()), None)
    if not rows:
        raise UsageError(
            f"expected a batch with rows to cut into micro-batches, found inputs of "
            f"{[tuple(x.shape) for x in leaves if isinstance(x, Tensor)]}; pass tensors with the "
            "batch on dim 0"
        )
    edges = [rows * index // min(count, rows) for index in range(min(count, rows) + 1)]
    found = []
    for start, stop in pairwise(edges):
        some = [
            x[start:stop] if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x
            for x in leaves
        ]
        given, named, wanted = tree_unflatten(some, tree)
        found.append(MicroBatch(given, named, stop - start, wanted))
    return found


def join_outputs(outputs: Sequence[Any], batches: Sequence[MicroBatch]) -> Any:
    """Return the output that the model would have returned for the whole batch.

    Tensors with a row for each of the batch are concatenated; 0-d numbers are averaged by rows; of
    other values, the first micro-batch's counts.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    trees = {str(tree) for _, tree in flat}
    if len(trees) > 1:
        raise UsageError(
            "expected the model to return the same structure for every micro-batch, found several; "
            "set micro_batches: 1"
        )
    rows = [batch.rows for batch in batches]
    joined = [_join(leaves, rows) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(joined, flat[0][1])


def _join(leaves: Sequence[Any], rows: Sequence[int]) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor):
        return first
    if all(x.dim() and x.shape[0] == count for x, count in zip(leaves, rows, strict=True)):
        return torch.cat(list(leaves))
    if not first.dim() and first.is_floating_point():
        parts = [x * (count / sum(rows)) for x, count in zip(leaves, rows, strict=True)]
        return torch.stack(parts).sum()
    return first


def cut_from_graph(output: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Return an output on a new graph, the leaves of this graph, and the tensors behind them."""
    inside: list[Tensor] = []
    outside: list[Tensor] = []

    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        inside.append(x)
        outside.append(x.detach().requires_grad_())
        return outside[-1]

    return tree_map(cut, output), outside, inside
