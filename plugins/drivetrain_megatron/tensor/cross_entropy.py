"""Cross entropy of logits cut over the vocabulary, not gathered (Shoeybi et al. 2019, section 3).

With x the logits, m their maximum and y the target (arXiv 1909.08053)::

    loss = log(sum exp(x - m)) + m - x[y]        d loss / d x = softmax(x) - onehot(y)

so three small all-reduces do, one number per token each: the maximum, the sum of exponentials, and
the logit of the target. Label smoothing needs the sum of logits too. Backward sends nothing.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain_megatron.tensor.once import once_differentiable
from drivetrain_megatron.tensor.partition import Partition, check_words

LossReduction: TypeAlias = Literal["none", "sum", "mean"]


class Terms(NamedTuple):
    """The options of a cross entropy.

    Attributes:
        ranks: the axis.
        partition: of the classes; its dim does not matter.
        weight: of each class, shape (classes,), the same on all ranks; None: ones.
        ignore_index: targets that do not count.
        reduction: of the losses of single targets.
        label_smoothing: how much of a target is spread evenly over all classes, from 0 to 1.
    """

    ranks: Communicator
    partition: Partition
    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: LossReduction = "mean"
    label_smoothing: float = 0.0


def cross_entropy(logits: Tensor, target: Tensor, terms: Terms) -> Tensor:
    """Return the value of ``torch.nn.functional.cross_entropy`` for whole logits, on every rank.

    Logits are those of this rank's classes, (N, classes, ...) or (classes,); they are not changed.
    Targets are a class each, (N, ...) or (). Statistics are kept in fp32 for logits of less
    precision.

    Raises:
        UsageError: the targets are no classes, or of the wrong shape.
    """
    _check(logits, target, terms)
    device = logits.device.type
    dtype = torch.float32 if torch.is_autocast_enabled(device) else logits.dtype
    rows = logits.movedim(min(1, logits.dim() - 1), -1)
    flat = rows.reshape(target.numel(), rows.shape[-1])
    losses, weights = _Losses.apply(flat, target.reshape(-1), terms)  # type: ignore[no-untyped-call]
    if terms.reduction == "none":
        return losses.view(target.shape).to(dtype)  # type: ignore[no-any-return]
    total = losses.sum()
    # All targets ignored: 0 / 0, as in torch.
    return (total / weights.sum() if terms.reduction == "mean" else total).to(dtype)  # type: ignore[no-any-return]


class _Losses(torch.autograd.Function):
    """The loss and the weight of each target; shapes: x (n, local), target, losses (n,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
        counts = target != terms.ignore_index
        class_weight = terms.weight if terms.weight is None else terms.weight.to(_exact(x))
        words = target.masked_fill(~counts, 0)
        weights = counts.to(_exact(x)) if class_weight is None else class_weight[words] * counts
        ctx.mark_non_differentiable(weights)
        statistics = _Statistics.of(x, words, class_weight, terms)
        smooth = terms.label_smoothing
        losses = (1 - smooth) * weights * (statistics.log_sum - statistics.logit)
        if smooth:
            spread = statistics.total * statistics.log_sum - statistics.weighted
            losses += smooth / terms.partition.size * spread
        ctx.save_for_backward(x, words, counts, weights, class_weight, statistics.log_sum)
        ctx.terms, ctx.total = terms, statistics.total
        return losses.masked_fill_(~counts, 0), weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        x, words, counts, weights, class_weight, log_sum = ctx.saved_tensors
        terms: Terms = ctx.terms
        rank, partition = terms.ranks.rank, terms.partition
        each = terms.label_smoothing / partition.size
        hit = (1 - terms.label_smoothing) * weights * grad
        out = (x.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp_()
        out *= (hit + each * ctx.total * grad).unsqueeze(-1)
        if terms.label_smoothing:
            mine = 1 if class_weight is None else _own_weights(class_weight, terms)
            out -= each * grad.unsqueeze(-1) * mine
        if x.shape[-1]:
            local, elsewhere = partition.here(words, rank)
            out.scatter_add_(-1, local.unsqueeze(-1), -hit.masked_fill(elsewhere, 0).unsqueeze(-1))
        # What is ignored has no gradient, also where its factor is the nan of an empty mean.
        return out.masked_fill_(~counts.unsqueeze(-1), 0).to(x.dtype), None, None


class _Statistics(NamedTuple):
    """Numbers of whole rows of logits, shape (n,).

    Attributes:
        log_sum: the logarithm of the sum of exponentials.
        logit: that of the target.
        weighted: the sum of logits times class weights; zeros without label smoothing.
        total: the sum of class weights.
    """

    log_sum: Tensor
    logit: Tensor
    weighted: Tensor
    total: Tensor | float

    @classmethod
    def of(
        cls, x: Tensor, words: Tensor, class_weight: Tensor | None, terms: Terms
    ) -> "_Statistics":
        """Return the statistics of this rank's classes of the logits, shape (n, local)."""
        ranks, exact = terms.ranks, x.to(_exact(x))
        highest = exact.amax(-1) if x.shape[-1] else exact.new_full(words.shape, -torch.inf)
        maximum = ranks.all_reduce(highest, reduction="max")
        logit = _own_logits(exact, words, terms)
        pending = [ranks.all_reduce(logit)]
        weighted, total = torch.zeros_like(logit), 1.0 * terms.partition.size
        if terms.label_smoothing:
            mine = exact if class_weight is None else exact * _own_weights(class_weight, terms)
            weighted = mine.sum(-1)
            pending.append(ranks.all_reduce(weighted))
        maximum.wait()
        sums = (exact - highest.unsqueeze(-1)).exp_().sum(-1)
        ranks.all_reduce(sums).wait()
        for handle in pending:
            handle.wait()
        if class_weight is not None:
            return cls(sums.log_() + highest, logit, weighted, class_weight.sum())
        return cls(sums.log_() + highest, logit, weighted, total)


def _own_weights(class_weight: Tensor, terms: Terms) -> Tensor:
    """Return this rank's part of the weights of all classes."""
    start, stop = terms.partition.range_of(terms.ranks.rank)
    return class_weight[start:stop]


def _own_logits(exact: Tensor, words: Tensor, terms: Terms) -> Tensor:
    """Return the logit of each target that is this rank's, zero for others, shape (n,)."""
    if exact.shape[-1] == 0:
        return exact.new_zeros(words.shape)
    local, elsewhere = terms.partition.here(words, terms.ranks.rank)
    return exact.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check(logits: Tensor, target: Tensor, terms: Terms) -> None:
    if target.is_floating_point():
        raise UsageError(
            f"expected targets that are classes, found probabilities ({target.dtype}, shape "
            f"{tuple(target.shape)}); gather the logits before the loss: logits.gathered()"
        )
    start, stop = terms.partition.range_of(terms.ranks.rank)
    dim = min(1, logits.dim() - 1)
    expected = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    if target.shape != expected or logits.shape[dim] != stop - start:
        raise UsageError(
            f"expected logits (N, classes, ...) with {stop - start} classes of this rank and "
            f"targets (N, ...), found shapes {tuple(logits.shape)} and {tuple(target.shape)}"
        )
    if terms.reduction not in ("none", "sum", "mean"):
        raise UsageError(f"expected reduction none, sum or mean, found {terms.reduction!r}")
    ignored = target == terms.ignore_index
    check_words(target.masked_fill(ignored, 0), terms.partition.size, "targets")
