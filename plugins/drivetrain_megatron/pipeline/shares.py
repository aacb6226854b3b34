"""The weight of each micro-batch's loss in the loss of the batch, known before it is computed."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.batches import MicroBatch
from drivetrain_megatron.recording.proxy import StageProxy


class Weights(IntEnum):
    """The kind of these weights; of several ranks' answers the highest counts."""

    ROWS = 0
    """Rows over those of the batch: the loss is a mean over rows."""
    ONES = 1
    """One each: the loss is a sum, perhaps over a number of the whole batch."""
    TARGETS = 2
    """Counted targets over those of the batch, where negative targets may be ignored."""
    COUNTED = 3
    """The same, where any target may be ignored or weigh differently."""
    NONE = 4
    """None are right: the loss is made of the whole batch."""


def shares_of(
    weights: Weights,
    batches: Sequence[MicroBatch],
    loss_without_blocks: Callable[[MicroBatch], Any],
) -> list[float]:
    """Return factors of the micro-batches' losses whose sum is the loss of the batch.

    Targets that do not count are found by making the loss of each micro-batch on proxies.

    Raises:
        UsageError: the loss is no longer the mean of one cross entropy.
    """
    if len(batches) == 1 or weights is Weights.ONES:
        return [1.0] * len(batches)
    counts = [float(batch.rows) for batch in batches]
    if weights in (Weights.TARGETS, Weights.COUNTED):
        counted = [_counted(batch, loss_without_blocks) for batch in batches]
        counts = counted if sum(counted) else counts
    return [count / sum(counts) for count in counts]


def has_negative(batch: MicroBatch) -> bool:
    """Whether some integer of a batch is negative: losses ignore such targets."""
    leaves = tree_leaves((batch.args, dict(batch.kwargs), batch.targets))
    integers = [x for x in leaves if isinstance(x, Tensor) and x.dtype == torch.int64 and x.numel()]
    return any(bool((x < 0).any()) for x in integers)


def _counted(batch: MicroBatch, loss_without_blocks: Callable[[MicroBatch], Any]) -> float:
    """Return over how many targets the loss is a mean."""
    counter = TargetCounter()
    with counter, torch.no_grad():
        loss_without_blocks(batch)
    if len(counter.counts) != 1:
        raise UsageError(
            f"expected a loss that is the mean of one cross entropy, as in the first call with "
            f"these inputs, found {len(counter.counts)} of them; make it in the same way in every "
            "call, or set micro_batches: 1"
        )
    return counter.counts[0]


class TargetCounter(TorchFunctionMode):
    """Counts the targets of cross entropies.

    Attributes:
        counts: over how many targets, or weights of targets, each is a mean.
        lengths: how many targets each has, counted or not.
        varies: whether other targets than negative ones may be ignored or weigh differently.
    """

    def __init__(self, *, ignores_zeros: bool = False) -> None:
        super().__init__()
        self._ignores_zeros = ignores_zeros
        self.counts: list[float] = []
        self.lengths: list[int] = []
        self.varies = False

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
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            self._note(given.arguments)
            return func(*given.args, **given.kwargs)
        return func(*args, **kwargs)

    def _note(self, given: dict[str, Any]) -> None:
        target, weight, ignored = given["target"], given["weight"], given["ignore_index"]
        if target.is_floating_point() or isinstance(target, StageProxy):
            return
        if self._ignores_zeros:
            target = given["target"] = target.masked_fill(target == 0, ignored)
        if given["reduction"] != "mean":
            return
        kept = target[target != ignored]
        self.counts.append(float(kept.numel() if weight is None else weight[kept].sum()))
        self.lengths.append(target.numel())
        self.varies |= weight is not None or ignored >= 0
