"""``nn.MultiheadAttention`` on this rank's heads (Shoeybi et al. 2019, section 3).

A rank has its heads' rows of q, k, v and their columns of the output projection. Each head is
computed by one rank as a whole, so that attention itself sends nothing. Masks of single heads are
cut, weights that the caller wants to see are gathered, or their mean over heads is summed over
ranks.

Shapes: L targets, S sources, N batch, E features, D features of a head, H heads, h local ones.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError, UsageError
from drivetrain_megatron.tensor.behavior import Behavior, attach, original_class
from drivetrain_megatron.tensor.linear import as_computed, row_product
from drivetrain_megatron.tensor.operators import Edges, gather, reduce
from drivetrain_megatron.tensor.partition import Partition, even, packed, units


class AttentionCall(NamedTuple):
    """The arguments of ``nn.MultiheadAttention`` beside query, key and value."""

    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


@dataclass(frozen=True)
class HeadAttention(Behavior):
    """Multi-head attention with this rank's heads."""

    edges: Edges
    heads: Partition

    is_traced = True

    def forward(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, (L, N, E) or (N, L, E), or unbatched (L, E), and weights or None.

        Raises:
            UsageError: a mask has the wrong shape, or the input is a nested tensor.
        """
        call = AttentionCall(*args, **kwargs)
        _check_call(query, call)
        q, k, v = self._entered(query, key, value)
        is_batched = q.dim() == 3
        if not is_batched:
            q, k, v = (each.unsqueeze(1) for each in (q, k, v))
        elif module.batch_first:
            q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        heads = self._projected(module, q, k, v)  # (N, h, L or S, D) each
        mask = self._mask(call, heads[0], heads[1].shape[2])
        dropout = module.dropout if module.training else 0.0
        weights = None
        if call.need_weights:
            context, weights = _attended(heads, mask, dropout)
        else:
            q, k, v = heads
            context = F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p=dropout, is_causal=call.is_causal and mask is None
            )
        # (N, h, L, D) to (L, N, h D), as the caller has it
        joined = context.permute(2, 0, 1, 3).flatten(2)
        if not is_batched:
            joined = joined.squeeze(1)
        elif module.batch_first:
            joined = joined.transpose(0, 1)
        return self._output(module, joined), self._shown(weights, call, is_batched)

    def _entered(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Let each distinct input enter once: self-attention costs one collective, not three."""
        distinct = {id(each): each for each in (query, key, value)}
        entered = {known: self.edges.enter(each) for known, each in distinct.items()}
        return entered[id(query)], entered[id(key)], entered[id(value)]

    def _projected(self, module: Any, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return local q (N, h, L, D), k and v (N, h, S, D)."""
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        bias = module.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        local = self.heads.local_sizes[self.edges.ranks.rank]
        return [
            F.linear(x, weight, b).view(*x.shape[:-1], local, module.head_dim).permute(1, 2, 0, 3)
            for x, weight, b in zip((q, k, v), weights, biases, strict=True)
        ]

    def _mask(self, call: AttentionCall, q: Tensor, sources: int) -> Tensor | None:
        """Return the mask that is added to the scores, broadcastable to (N, h, L, S)."""
        batch, _, targets, _ = q.shape
        mask = None
        # Attention may use its own causal mask: as torch, not for padding or weights.
        hint = call.is_causal and call.key_padding_mask is None and not call.need_weights
        if call.attn_mask is not None and not hint:
            mask = self._of_heads(_added(call.attn_mask, q.dtype), batch, targets, sources)
        if call.key_padding_mask is not None:
            padding = _added(call.key_padding_mask, q.dtype).view(batch, 1, 1, sources)
            mask = padding if mask is None else mask + padding
        return mask

    def _of_heads(self, mask: Tensor, batch: int, targets: int, sources: int) -> Tensor:
        """Return the mask of this rank's heads, broadcastable to (N, h, L, S)."""
        heads = self.heads.size
        if mask.shape == (targets, sources):
            return mask
        if mask.shape != (batch * heads, targets, sources):
            raise UsageError(
                f"expected an attn_mask of shape {(targets, sources)}, or one mask per head of "
                f"shape {(batch * heads, targets, sources)}, found {tuple(mask.shape)}"
            )
        start, stop = self.heads.bounds[self.edges.ranks.rank]
        return mask.reshape(batch, heads, targets, sources)[:, start:stop]

    def _output(self, module: Any, context: Tensor) -> Tensor:
        """Return the output projection, summed over ranks; the bias is added once."""
        out = module.out_proj
        x, weight, bias = as_computed(context, out.weight, out.bias)
        x = row_product(x, self.edges.ranks, self.edges.sequence, weight)
        return x if bias is None else x + bias

    def _shown(
        self, weights: Tensor | None, call: AttentionCall, is_batched: bool
    ) -> Tensor | None:
        """Return the weights of all heads, (N, H, L, S), or their mean, (N, L, S)."""
        if weights is None:
            return None
        ranks: Communicator = self.edges.ranks
        if call.average_attn_weights:
            weights = reduce(weights.sum(1) / self.heads.size, ranks)
        else:
            weights = gather(weights, ranks, self.heads)
        return weights if is_batched else weights.squeeze(0)


_FALSE = property(lambda _: False)
"""One for all attentions, which have one class then, and their blocks one graph."""


def attach_heads(module: nn.Module, edges: Edges) -> None:
    """Let an attention with this rank's heads compute as such; ``head_partitions`` cuts it.

    Raises:
        ConfigError: the module is no such attention, or has options that are not of one head.
    """
    if (
        not isinstance(module, nn.MultiheadAttention)
        or original_class(module).forward is not nn.MultiheadAttention.forward
    ):
        raise ConfigError(
            f"expected an attention that computes as nn.MultiheadAttention does, found {module!r}; "
            "leave it out of the plan, or cut its linear layers"
        )
    found = {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
    if options := [name for name, is_set in found.items() if is_set]:
        raise ConfigError(
            f"expected an attention without {', '.join(options)}, found {module!r}; leave it out "
            "of the plan, or make it without"
        )
    heads = even(1, module.num_heads, edges.ranks.size)
    # nn.TransformerEncoderLayer computes attention itself in eval mode, from whole weights, unless
    # this is False; the attention's own forward looks at its weights instead.
    attach(module, HeadAttention(edges, heads), _qkv_same_embed_dim=_FALSE)


def head_partitions(module: nn.MultiheadAttention, ranks: int) -> dict[str, Partition]:
    """Return how the parameters of an attention are cut by heads, by name within the module."""
    features, head_dim = module.embed_dim, module.head_dim
    rows = packed(0, (features,) * 3, ranks, unit=head_dim)
    single = units(0, features, head_dim, ranks)
    cut = {
        "in_proj_weight": rows,
        "in_proj_bias": rows,
        **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), single),
        "out_proj.weight": units(1, features, head_dim, ranks),
    }
    names = {name for name, _ in module.named_parameters()}
    return {name: partition for name, partition in cut.items() if name in names}


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add: -inf where a boolean one is True."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _attended(heads: list[Tensor], mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Return context (N, h, L, D) and weights (N, h, L, S), after dropout, as torch."""
    q, k, v = heads
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, p=dropout)
    return weights @ v, weights


def _check_call(query: Tensor, call: AttentionCall) -> None:
    if query.is_nested:
        raise UsageError(
            "expected padded batches, found a nested tensor; make the encoder with "
            "nn.TransformerEncoder(..., enable_nested_tensor=False)"
        )
    if call.is_causal and call.attn_mask is None:
        raise UsageError(
            "expected an attn_mask with is_causal=True, which only says what the mask is, found "
            "None; pass nn.Transformer.generate_square_subsequent_mask(length)"
        )
    for name in ("attn_mask", "key_padding_mask"):
        mask = getattr(call, name)
        if mask is not None and mask.dtype is not torch.bool and not mask.is_floating_point():
            raise UsageError(f"expected a {name} of bools or floats, found {mask.dtype}")
