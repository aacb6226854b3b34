"""Where a model drops elements, how ranks divide a dropout's input, and how torch's are replaced.

Replaced are ``F.dropout``, ``torch.dropout``, and the dropout of attention weights inside of
``F.scaled_dot_product_attention``, which is then computed step by step.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from drivetrain.collectives import Communicator
from drivetrain.collectives.communicator import SoloCommunicator
from drivetrain.errors import UsageError
from drivetrain.model.look import Look, ModelOperation
from drivetrain_megatron.tensor.attention import attach_heads, keep_padded
from drivetrain_megatron.tensor.behavior import behavior_of
from drivetrain_megatron.tensor.operators import Edges, TokenShards
from drivetrain_megatron.tensor.partition import Partition

Drop: TypeAlias = Callable[[Tensor, float], Tensor]
"""Returns a tensor of which elements were dropped with a probability above 0."""


class Dropping(TorchFunctionMode):
    """Asks ``drop`` wherever torch would draw a mask; all other functions are torch's."""

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
        arguments = _ARGUMENTS.get(func)
        if arguments is None:
            return func(*args, **(kwargs or {}))
        return arguments(*args, **(kwargs or {})).dropped(self._drop)


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


def _native(input: Tensor, p: float, train: bool) -> _Dropout:  # noqa: A002 - as torch.dropout
    return _Dropout(input, p, train)


def _native_in_place(input: Tensor, p: float, train: bool) -> _Dropout:  # noqa: A002
    return _Dropout(input, p, train, inplace=True)


_ARGUMENTS: dict[Any, Callable[..., _Dropout | Attention]] = {
    F.dropout: _Dropout,
    torch.dropout: _native,
    torch.dropout_: _native_in_place,
    F.scaled_dot_product_attention: Attention,
}


@dataclass(frozen=True, slots=True)
class Site:
    """One place in the code that drops elements.

    Attributes:
        module: name of the innermost module that runs.
        index: how many dropouts the same call of the module had before.
    """

    module: str
    index: int


DropoutLayout: TypeAlias = Partition | TokenShards | None
"""What of a tensor a rank has: a share of heads or features, of tokens, or everything."""


@dataclass(slots=True)
class Layouts:
    """How the ranks divide the inputs of a model's dropouts.

    Attributes:
        blocks: names of the divided blocks; outside of them every rank has everything.
        found: by site inside of blocks.
    """

    blocks: tuple[str, ...] = ()
    found: dict[Site, DropoutLayout] = field(default_factory=dict)

    def add(self, block: str, found: Mapping[Site, DropoutLayout]) -> None:
        """Add the layouts of a block, whose sites have names inside of the block."""
        self.blocks = (*self.blocks, block)
        for site, layout in found.items():
            self.found[Site(f"{block}.{site.module}".strip("."), site.index)] = layout


def partition_of(site: Site, layouts: Layouts, ranks: Communicator) -> Partition | None:
    """Return how the ranks divide the input of a dropout at this moment.

    Raises:
        UsageError: the site is inside of a block and dropped nothing when the block was tried.
    """
    layout = layouts.found.get(site)
    if isinstance(layout, TokenShards):
        return layout.partition(ranks.size)
    if layout is None and site not in layouts.found and ranks.size > 1:
        inside = (b for b in layouts.blocks if f"{site.module}.".startswith(f"{b}." if b else ""))
        if (block := next(inside, None)) is not None:
            raise UsageError(
                f"expected dropout {site.index} of {site.module!r} to be one that was seen when "
                f"block {block!r} was tried, found a new one; let the example inputs reach it, and "
                "set its probability above 0 before prepare()"
            )
    return layout


class DropoutRecorder:
    """Notes the inputs of a module's dropouts, and drops nothing."""

    def __init__(self, root: nn.Module) -> None:
        self.seen: dict[Site, list[Tensor]] = defaultdict(list)
        self._running: list[tuple[str, Iterator[int]]] = []
        self._handles = []
        for name, module in root.named_modules():
            begin = module.register_forward_pre_hook(self._beginning(name), prepend=True)
            end = module.register_forward_hook(self._end, always_call=True)
            self._handles += [begin, end]

    def watching(self) -> Dropping:
        """Return the context in which dropouts are noted."""
        return Dropping(self._note)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _beginning(self, name: str) -> Any:
        def begin(module: nn.Module, args: Any) -> None:
            self._running.append((name, iter(range(1 << 30))))

        return begin

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _note(self, x: Tensor, p: float) -> Tensor:
        name, count = self._running[-1]
        self.seen[Site(name, next(count))].append(x.detach().clone())
        return x


def dropping_modules(model: nn.Module, look: Look) -> frozenset[str]:
    """Return the names of modules that drop elements in a look at a training forward."""
    inside = {name for name, m in model.named_modules() if _is_attention(m)}
    seen = {each.module for each in look.operations if drops_elements(each)}
    return frozenset(seen | inside)


def drops(module: nn.Module) -> bool:
    """Whether a module of torch drops elements in training."""
    return (isinstance(module, nn.Dropout) and module.p > 0.0) or _is_attention(module)


def open_attentions(model: nn.Module, ranks: Communicator) -> None:
    """Let attentions that drop weights, and are whole on this rank, compute where masks reach them.

    Torch's own function does everything inside. Attentions with options that ours has not stay.
    """
    solo = SoloCommunicator(_alone(ranks), ranks.traffic, ranks.timeout)
    found = [m for m in model.modules() if _is_attention(m) and behavior_of(m) is None]
    if found:
        keep_padded(model)
    for module in found:
        attach_heads(module, Edges(solo))


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention of torch that drops weights, and that ours can replace."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and module.dropout > 0.0
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _alone(ranks: Communicator) -> Any:
    axis = ranks.axis
    at = axis.rank
    return replace(
        axis, size=1, rank=0, ranks=axis.ranks[at : at + 1], hosts=axis.hosts[at : at + 1]
    )
