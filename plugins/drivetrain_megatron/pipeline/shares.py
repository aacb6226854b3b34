"""What each micro-batch counts for in the loss of the batch, known before anything is computed.

A mean over rows counts by rows. A mean over tokens of which some are ignored counts by the others:
targets are inputs, so every stage can count them in a pass without blocks.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from drivetrain_megatron.pipeline.batches import MicroBatch
from drivetrain_megatron.pipeline.proxy import StageProxy

_TOTAL = "num_items_in_batch"
"""Hugging Face's models divide a sum by it, instead of taking a mean."""


def shares_of(
    batches: Sequence[MicroBatch], loss_without_blocks: Callable[[MicroBatch], Any]
) -> list[float]:
    """Return factors of the micro-batches' losses whose sum is the loss of the batch.

    Args:
        batches: the micro-batches.
        loss_without_blocks: makes the loss of one on proxies.
    """
    if any(batch.kwargs.get(_TOTAL) is not None for batch in batches):
        return [1.0] * len(batches)
    counts = [float(batch.rows) for batch in batches]
    if len(batches) > 1 and any(map(_may_ignore, batches)):
        counted = [_counted(batch, loss_without_blocks) for batch in batches]
        known: list[float] = [count for count in counted if count is not None]
        if len(known) == len(batches) and sum(known, 0.0):
            counts = known
    return [count / sum(counts) for count in counts]


def _may_ignore(batch: MicroBatch) -> bool:
    """Whether some target may be one that losses ignore: those are negative."""
    leaves = tree_leaves((batch.args, dict(batch.kwargs), batch.targets))
    integers = [x for x in leaves if isinstance(x, Tensor) and x.dtype == torch.int64 and x.numel()]
    return any(bool((x < 0).any()) for x in integers)


def _counted(batch: MicroBatch, loss_without_blocks: Callable[[MicroBatch], Any]) -> float | None:
    """Return over how many targets the loss is a mean; None if that is not seen."""
    counter = _Counter()
    with counter, torch.no_grad():
        loss_without_blocks(batch)
    return counter.counts[0] if len(counter.counts) == 1 else None


class _Counter(TorchFunctionMode):
    """Counts the targets of cross entropies of proxies."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[float] = []

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch; note the targets of a loss."""
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        target, weight = given.arguments["target"], given.arguments["weight"]
        is_mean = given.arguments["reduction"] == "mean"
        if not is_mean or target.is_floating_point() or isinstance(target, StageProxy):
            return
        kept = target[target != given.arguments["ignore_index"]]
        self.counts.append(float(kept.numel() if weight is None else weight[kept].sum()))
