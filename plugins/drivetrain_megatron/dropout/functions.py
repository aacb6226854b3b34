"""Hands every dropout that torch functions are asked for to somebody else, inside of a context.

That is ``F.dropout``, ``torch.dropout``, and the dropout of attention weights inside of
``F.scaled_dot_product_attention``, which is then computed step by step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from drivetrain.model.look import ModelOperation

Drop: TypeAlias = Callable[[Tensor, float], Tensor]
"""Returns a tensor of which elements were dropped with a probability above 0."""


class Dropping(TorchFunctionMode):
    """Asks ``drop`` wherever torch would draw a mask; all other functions are torch's.

    Args:
        drop: gets what torch would drop elements of, and their probability.
    """

    def __init__(self, drop: Drop) -> None:
        super().__init__()
        self._drop = drop

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or its substitute."""
        substitute = _SUBSTITUTES.get(func)
        if substitute is None:
            return func(*args, **(kwargs or {}))
        return substitute(self._drop, *args, **(kwargs or {}))


class _Dropout(NamedTuple):
    """The arguments of ``F.dropout``."""

    input: Tensor
    p: float = 0.5
    training: bool = True
    inplace: bool = False

    @property
    def draws(self) -> bool:
        """Whether a mask is drawn."""
        return self.training and 0.0 < self.p <= 1.0

    def dropped(self, drop: Drop) -> Tensor:
        """Return the result."""
        if not self.draws:  # torch knows what is wrong with p
            return F.dropout(*self)
        result = drop(self.input, self.p)
        return self.input.copy_(result) if self.inplace else result


class _NativeDropout(NamedTuple):
    """The arguments of ``torch.dropout`` and ``torch.dropout_``."""

    input: Tensor
    p: float
    train: bool

    @property
    def draws(self) -> bool:
        """Whether a mask is drawn."""
        return _Dropout(*self).draws


class Attention(NamedTuple):
    """The arguments of ``F.scaled_dot_product_attention``.

    Shapes: query (..., heads, L, E), key (..., kv heads, S, E), value (..., kv heads, S, V); the
    result (..., heads, L, V).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def draws(self) -> bool:
        """Whether a mask is drawn."""
        return self.dropout_p > 0.0

    def dropped(self, drop: Drop) -> Tensor:
        """Return the result, of weights that were dropped."""
        if not self.draws:
            given = self._asdict()
            return F.scaled_dot_product_attention(**given)
        value = self._per_query_head(self.value)
        return drop(self.weights().to(value.dtype), self.dropout_p) @ value

    def weights(self) -> Tensor:
        """Return the attention weights, (..., heads, L, S), in fp32 at least."""
        query, key, mask = self.query, self._per_query_head(self.key), self.attn_mask
        factor = 1.0 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        scores = (query * factor) @ key.transpose(-2, -1)
        if self.is_causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(ones.triu(1), -torch.inf)
        if mask is not None and mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        wide = torch.float32 if scores.dtype.itemsize < 4 else scores.dtype
        # As torch's own: a row of which everything is masked becomes zeros.
        weights: Tensor = torch._safe_softmax(scores, -1, dtype=wide)
        return weights

    def _per_query_head(self, heads: Tensor) -> Tensor:
        """Return every kv head once for each of its query heads; a rank may have none."""
        own, count = heads.shape[-3] if heads.dim() > 2 else 1, self.query.shape[-3:-2].numel()
        if not self.enable_gqa or own in (0, count):
            return heads
        return heads.repeat_interleave(count // own, dim=-3)


def drops_elements(operation: ModelOperation) -> bool:
    """Whether an operation is a dropout that draws a mask."""
    arguments = _ARGUMENTS.get(operation.function)
    return arguments is not None and arguments(*operation.args, **operation.kwargs).draws


def _functional(drop: Drop, *args: Any, **kwargs: Any) -> Tensor:
    return _Dropout(*args, **kwargs).dropped(drop)


def _native(drop: Drop, *args: Any, **kwargs: Any) -> Tensor:
    return _Dropout(*_NativeDropout(*args, **kwargs)).dropped(drop)


def _native_in_place(drop: Drop, *args: Any, **kwargs: Any) -> Tensor:
    return _Dropout(*_NativeDropout(*args, **kwargs), inplace=True).dropped(drop)


def _attention(drop: Drop, *args: Any, **kwargs: Any) -> Tensor:
    return Attention(*args, **kwargs).dropped(drop)


_SUBSTITUTES: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _functional,
    torch.dropout: _native,
    torch.dropout_: _native_in_place,
    F.scaled_dot_product_attention: _attention,
}

_ARGUMENTS: dict[Any, type[_Dropout | _NativeDropout | Attention]] = {
    F.dropout: _Dropout,
    torch.dropout: _NativeDropout,
    torch.dropout_: _NativeDropout,
    F.scaled_dot_product_attention: Attention,
}
