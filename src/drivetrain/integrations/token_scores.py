"""The token scores of TRL's trainers, made of a model's logits, for ranks that divide its head.

TRL gives a model another forward, which multiplies with the head's weight itself. Ranks of tensor
and pipeline parallelism have a part of this weight, or none; the head's module knows how to work
with it.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

_SWITCH = "fused_lm_head"
"""Argument of TRL's forward that asks for scores in place of logits."""

_IGNORED = -100
"""Label of tokens without a score."""


@dataclass
class TokenScores(ModelOutput):
    """Scores of next tokens, under the names of TRL; each (batch, length - 1), 0 where ignored.

    Attributes:
        log_probs: log-probability of each label.
        entropy: of the distribution over the vocabulary.
        log_sum_sq_probs: logarithm of the sum of squared probabilities, without gradient.
        mean_logits: mean over the vocabulary, without gradient.
        is_top1: whether the label has the largest logit.
        label_mask: whether the label counts.
        aux_loss: of a mixture of experts, 0-d.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


def score_by_modules(model: nn.Module) -> None:
    """Let a model that TRL has changed make its scores of the logits that its modules return."""
    for module in model.modules():
        forward = vars(module).get("forward")
        given = getattr(forward, "__func__", None)
        if given and _SWITCH in inspect.signature(given, follow_wrapped=False).parameters:
            temperature = inspect.getclosurevars(given).nonlocals.get("temperature", 1.0)
            module.forward = _scoring(forward, temperature)  # type: ignore[arg-type]


def _scoring(forward: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    @functools.wraps(forward)
    def score(
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            return forward(*args, labels=labels, shift_labels=shift_labels, **kwargs)
        kwargs.pop("num_items_in_batch", None)  # of the model's own loss
        output = forward(*args, **kwargs)
        logits, targets = output.logits, shift_labels
        if labels is not None and targets is None:
            logits, targets = logits[:, :-1], labels[:, 1:]
        scores = scores_of(logits / temperature, targets)
        scores.aux_loss = getattr(output, "aux_loss", None)
        return scores

    return score


def scores_of(logits: Tensor, labels: Any) -> TokenScores:
    """Return the scores of labels.

    Args:
        logits: (batch, length, vocabulary).
        labels: (batch, length), int64; -100 is ignored.
    """
    counted = labels != _IGNORED
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = logits.log_softmax(-1)
    chosen = found.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    fixed = found.detach()
    scores = {
        "log_probs": chosen,
        "entropy": -(found.exp() * found).sum(-1),
        "log_sum_sq_probs": (2 * fixed).logsumexp(-1),
        "mean_logits": logits.detach().mean(-1),
        "is_top1": logits.detach().argmax(-1) == labels,
    }
    masked = {name: score.masked_fill(~counted, 0) for name, score in scores.items()}
    return TokenScores(**masked, label_mask=counted)
