"""Dropout masks by counting: equal where activations are equal, however ranks share the model.

Whether an element is kept is a hash of a key and of its global index (counter-based random numbers:
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Everything else that a forward
draws is the same on the ranks that share layers.
"""

import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.collectives.communicator import SoloCommunicator
from drivetrain.collectives.facts import differing
from drivetrain.data.examples import ExampleBatch
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.model.guard import Arguments, Function, Keywords
from drivetrain.model.modules import NamedModule, UninheritedHook, clean_name, uncompiled
from drivetrain.model.trace import ModelOperation, ModelTrace
from drivetrain.model.untouched import keep_padding
from drivetrain.runtime import rng
from drivetrain_megatron.recording.calls import (
    ExampleInputs,
    example_inputs,
    inputs_of_user,
    uncalled_blocks,
)
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.tensor.attention import attach_heads
from drivetrain_megatron.tensor.behavior import behavior_of, release, surround
from drivetrain_megatron.tensor.operators import Edges, TokenShards, Uncopied
from drivetrain_megatron.tensor.partition import Partition

# --- the hash ---

# Nothing is drawn, so a rank that holds a shard of a tensor computes the mask of its own elements
# and gets the bits that one process would have there ("Parallel random numbers: as easy as 1, 2,
# 3"). Rows of the tensor get two 32 bit keys from the 64 bit finalizer of SplitMix (Steele et al.
# 2014); elements of a row are hashed to 32 bits in two rounds of multiplication and xor with
# shifted bits, one row key before each.
#
# torch has signed integers only: multiplication wraps, shifts are followed by a mask.


WORD = 1 << 64
_COLUMNS = 1 << 10
"""Trailing dims are hashed together up to so many elements, so that rows are not too short."""

_TILE = 1 << 15
"""Elements per thread that are hashed at once on the CPU: they stay in its cache."""

_GOLDEN64, _FIRST64, _SECOND64 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN32, _FIRST32, _SECOND32 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def mix(value: int) -> int:
    """Return a hash of 64 bits of the low 64 bits of a number."""
    value %= WORD
    value = (value ^ (value >> 30)) * _FIRST64 % WORD
    value = (value ^ (value >> 27)) * _SECOND64 % WORD
    return value ^ (value >> 31)


def combine(*values: int) -> int:
    """Return a hash of 64 bits of several numbers, in their order."""
    state = 0
    for value in values:
        state = mix(state + _GOLDEN64 + mix(value + _GOLDEN64))
    return state


def _combined(value: int, other: int) -> int:
    """Return ``combine`` of a number and of another one, which was mixed before."""
    return mix(mix(mix(value + _GOLDEN64) + _GOLDEN64) + _GOLDEN64 + other)


def keep_mask(
    key: int,
    shape: Sequence[int],
    p: float,
    *,
    partition: Partition | None = None,
    rank: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """Return which elements of a tensor, or of this rank's share of the tensor, are kept.

    Args:
        key: 64 bits that stand for one call of dropout.
        shape: of this rank's tensor.
        p: probability of an element to be dropped, in steps of 2**-32.
        partition: the part of a dim on each rank; None for a whole tensor.
        rank: this one among the ranks of the partition.
        device: of the mask.

    Returns:
        Bools of that shape, true where kept.

    Raises:
        UsageError: the last dim has more than 2**32 elements.
    """
    if p <= 0.0 or p >= 1.0:
        return torch.full(tuple(shape), p <= 0.0, dtype=torch.bool, device=device)
    local, whole = list(shape) or [1], list(shape) or [1]
    indices = [torch.arange(size, device=device) for size in local]
    if partition is not None:
        whole[partition.dim] = partition.size
        ranges = [torch.arange(a, b, device=device) for a, b in partition.ranges[rank]]
        indices[partition.dim] = torch.cat(ranges) if ranges else indices[partition.dim]
    split = _split(whole)
    rows = _flat_index(indices[:split], whole[:split], device)
    columns = _flat_index(indices[split:], whole[split:], device)
    mask = torch.empty(len(rows), len(columns), dtype=torch.bool, device=device)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    terms = (columns * _GOLDEN32).to(torch.int32)
    tile = _tile_rows(mask)
    for start in range(0, len(rows), tile):
        hashes = _hashes(key, rows[start : start + tile], terms)
        torch.ge(hashes, threshold, out=mask[start : start + tile])
    return mask.view(tuple(shape))


def _split(whole: Sequence[int]) -> int:
    """Return how many leading dims count rows; the others are columns, 2**32 at most."""
    if whole[-1] > 2**32:
        raise UsageError(
            f"expected a last dim of at most 2**32 elements to drop some of, found {whole[-1]}; "
            "reshape the tensor to more dims before dropout"
        )
    extents = list(accumulate(reversed(whole), lambda a, b: a * b))
    dims = 1
    while dims < len(whole) and extents[dims - 1] < _COLUMNS and extents[dims] <= 2**32:
        dims += 1
    return len(whole) - dims


def _flat_index(
    indices: Sequence[Tensor], sizes: Sequence[int], device: torch.device | None
) -> Tensor:
    """Return the global flat index of each element, 1-D, int64, from those in each dim."""
    flat = torch.zeros(1, dtype=torch.int64, device=device)
    for index, size in zip(indices, sizes, strict=True):
        flat = (flat[:, None] * size + index).flatten()
    return flat


def _tile_rows(mask: Tensor) -> int:
    rows, columns = mask.shape
    if mask.device.type != "cpu":
        return max(rows, 1)
    return max(_TILE * torch.get_num_threads() // max(columns, 1), 1)


def _hashes(key: int, rows: Tensor, terms: Tensor) -> Tensor:
    """Return 32 bits for each element, shape (rows, columns); the highest are the best mixed."""
    keys = _row_keys(key, rows)
    first, second = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    hashes = terms ^ first[:, None]
    scratch = torch.empty_like(hashes)
    _fold(hashes, 16, scratch).mul_(_signed(_FIRST32, 32)).bitwise_xor_(second[:, None])
    return _fold(hashes, 15, scratch).mul_(_signed(_SECOND32, 32))


def _row_keys(key: int, rows: Tensor) -> Tensor:
    """Return 64 bits for each row."""
    state = rows * _signed(_GOLDEN64, 64) + _signed(key, 64)
    scratch = torch.empty_like(state)
    _fold(state, 30, scratch).mul_(_signed(_FIRST64, 64))
    _fold(state, 27, scratch).mul_(_signed(_SECOND64, 64))
    return _fold(state, 31, scratch)


def _fold(state: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """Xor numbers, in place, with themselves shifted to the right; zeros come in on the left."""
    width = 8 * state.element_size()
    torch.bitwise_right_shift(state, bits, out=scratch)
    return state.bitwise_xor_(scratch.bitwise_and_((1 << (width - bits)) - 1))


def _signed(value: int, bits: int) -> int:
    """Return the signed number with the same low bits."""
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


# --- where a model drops elements, how ranks divide a dropout's input, how torch's are replaced ---

# Replaced are ``F.dropout``, ``torch.dropout``, and the dropout of attention weights inside of
# ``F.scaled_dot_product_attention``, which is then computed step by step.


Drop: TypeAlias = Callable[[Tensor, float], Tensor]
"""Returns a tensor of which elements were dropped with a probability above 0."""


class Dropping(TorchFunctionMode):
    """Asks ``drop`` wherever torch would draw a mask; all other functions are torch's."""

    def __init__(self, drop: Drop) -> None:
        super().__init__()
        self._drop = drop

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
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


_ARGUMENTS: dict[Any, Callable[..., _Dropout | Attention]] = {
    F.dropout: _Dropout,
    torch.dropout: lambda input, p, train: _Dropout(input, p, train),  # noqa: A006, PLW0108
    torch.dropout_: lambda input, p, train: _Dropout(input, p, train, inplace=True),  # noqa: A006
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
        for name, module in root.named_modules():
            module.register_forward_pre_hook(self._beginning(name), prepend=True)
            module.register_forward_hook(self._end, always_call=True)

    def watching(self) -> Dropping:
        """Return the context in which dropouts are noted."""
        return Dropping(self._note)

    def _beginning(self, name: str) -> Any:
        def begin(module: nn.Module, args: Any) -> None:
            self._running.append((name, count()))

        return begin

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _note(self, x: Tensor, p: float) -> Tensor:
        name, sites = self._running[-1]
        self.seen[Site(name, next(sites))].append(x.detach().clone())
        return x


def dropping_modules(model: nn.Module, trace: ModelTrace) -> frozenset[str]:
    """Return the names of modules that drop elements in a trace of a training forward."""
    inside = {name for name, m in model.named_modules() if _is_attention(m)}
    seen = {each.module for each in trace.operations if drops_elements(each)}
    return frozenset(seen | inside)


def open_attentions(model: nn.Module, ranks: Communicator) -> None:
    """Let attentions that drop weights, and are whole on this rank, compute where masks reach them.

    Torch's own function does everything inside. Attentions with options that ours has not stay.
    """
    axis = ranks.axis
    here = slice(axis.rank, axis.rank + 1)
    alone = replace(axis, size=1, rank=0, ranks=axis.ranks[here], hosts=axis.hosts[here])
    solo = SoloCommunicator(alone, ranks.traffic, ranks.timeout)
    found = [m for m in model.modules() if _is_attention(m) and behavior_of(m) is None]
    if found:
        keep_padding(model)
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


# --- the key of every dropout of a forward, and the modules with these dropouts ---

# Every module that drops gets masks that count (``masks``) in place of torch's. The key of a call
# comes from the state of a chain: a forward starts it from (seed, data-parallel rank, number of the
# forward), every dropout and every block moves it on. The chain is kept as the seed of torch's
# default CPU generator. Whoever computes a block again in backward (our recompute, torch's
# checkpoint) brings back the state of this generator, and so the masks. After a block the chain
# does not depend on the dropouts inside: pipeline stages, which skip the blocks of others, agree.
#
# Everything else that a forward draws comes from generators that are seeded alike on all ranks of a
# cell; afterwards they are as before. In a pipeline that is so without any dropout, and in
# evaluation: stages run unlike parts of a forward, and would go on with unlike generators.


logger = get_logger(__name__)

_CHECK_BITS = 16


_AFTER_SITE, _AFTER_BLOCK, _CHECK = (mix(value + _GOLDEN64) for value in (1, 2, _CHECK_BITS))
"""Mixed once: every block and every dropout combines a state with them."""


class Dropout(Uncopied):
    """The masks of one prepared model.

    Args:
        seed: tells the masks of different runs apart.
        replica: the data-parallel rank, which tells those of replicas apart.
        ranks: the axis ``tp``.

    Attributes:
        layouts: how the ranks divide the inputs of dropouts in blocks; all else is whole on each.
        forwards: how many have dropped elements so far.
    """

    def __init__(self, seed: int, replica: int, ranks: Communicator) -> None:
        self.layouts = Layouts()
        self._source = seed, replica
        self._ranks = ranks
        self._names: frozenset[str] = frozenset()
        self.forwards = 0
        self._counting = True
        self._numbered = False
        self._dropped = False
        self._left_out = False
        self._evaluated = 0
        self._modules: list[nn.Module] = []
        self._staged: tuple[nn.Module, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._entered: dict[nn.Module, int | None] = {}
        self._latest: int | None = None
        self._several = False
        self._before: rng.Snapshot | None = None

    def find(
        self,
        model: nn.Module,
        inputs: ExampleInputs | None,
        examples: Sequence[ExampleBatch] = (),
    ) -> None:
        """Note which modules drop; the model is whole yet, and is not changed.

        Without inputs, batches of loaders are tried, and guesses. If none is accepted, functional
        dropout remains torch's on one rank, and counts in the whole model on several.
        """
        model = uncompiled(model)
        try:
            given = example_inputs(model, examples) if inputs is None else inputs
        except UsageError:
            if inputs_of_user(model) is not None:
                raise
            self._names = frozenset(
                name
                for name, module in model.named_modules()
                if _is_attention(module) or (isinstance(module, nn.Dropout) and module.p > 0.0)
            )
            if self._ranks.size > 1:
                self._names |= {""}  # whatever is random in it must be equal on all of them
            else:
                logger.announce(
                    "dropout: only nn.Dropout takes masks that count: no inputs were found with "
                    f"which {type(model).__name__} can be called; prepare it together with its "
                    "loader, or set model.example_inputs"
                )
        else:
            self._names = dropping_modules(model, given.trace)
            for block, like in uncalled_blocks(given.trace, model).items():
                inside = (name for name in self._names if f"{name}.".startswith(f"{like}."))
                self._names |= {block + name.removeprefix(like) for name in inside}

    def attach(self, model: nn.Module, *, counting: bool = True) -> None:
        """Let modules of a model drop by these masks; a model that drops nothing is left alone.

        Args:
            model: divided; its forward is one forward of the chain.
            counting: whether forwards are counted here; if not, stages run them, by numbers.
        """
        self._counting, model = counting, uncompiled(model)
        self._staged = () if counting else (model,)
        if not self._names:
            return
        open_attentions(model, self._ranks)
        for name, module in model.named_modules():
            if name in self._names or isinstance(module, nn.Dropout):
                surround(module, partial(self._masked, clean_name(name)))
                self._modules.append(module)
        surround(model, lambda _: self.forward())
        self._modules.append(model)

    def follow(self, blocks: Iterable[NamedModule]) -> None:
        """Make the chain independent of the dropouts inside of these blocks."""
        for _, block in blocks if self._names or self._staged else ():
            self._handles.append(
                block.register_forward_pre_hook(UninheritedHook(self._enter_block))
            )
            self._handles.append(block.register_forward_hook(UninheritedHook(self._leave_block)))

    @contextmanager
    def forward(self, number: int | None = None) -> Iterator[None]:
        """Context of one forward of the model, which begins a chain.

        Without a number from ``take`` the number is that of the forward around, else the next. The
        next number is used up by a forward that drops something, so not in evaluation.
        """
        if self._numbered or (number is None and not self._trains()):
            yield
            return
        self._numbered, self._dropped = number is not None, False
        own = self.forwards if number is None else number
        self._latest = state = _packed(combine(*self._source, own))
        if self._several and self._before is None:
            self._before = rng.Snapshot()
        try:
            with rng.fork(state, self._before):
                yield
        finally:
            self._numbered = False
            self.forwards += self._counting and self._dropped and not self._left_out

    @contextmanager
    def several(self) -> Iterator[None]:
        """Context of several forwards, after all of which generators are as before the first."""
        self._several = True
        try:
            yield
        finally:
            before, self._before, self._several = self._before, None, False
            if before is not None:
                before.put_back()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context of forwards in which nothing is dropped; they are not counted."""
        self._left_out, before = True, self._left_out
        try:
            yield
        finally:
            self._left_out = before

    def take(self, count: int) -> int:
        """Return the number of the first of some forwards; below 0 in evaluation."""
        if not self._trains():
            self._evaluated += count
            return -self._evaluated
        self.forwards += count
        return self.forwards - count

    def _trains(self) -> bool:
        return any(module.training for module in (*self._modules, *self._staged))

    def key(self) -> int:
        """Return the key of the next dropout.

        Raises:
            UsageError: ranks could draw different masks, because no forward of the model runs.
        """
        state = self._state()
        if state is None:
            if self._ranks.size > 1:
                raise UsageError(
                    "expected dropout inside of a forward of the prepared model, or where it is "
                    "computed again in backward from the same random state, found another state "
                    f"of torch's CPU generator on rank {self._ranks.rank}; call the model itself, "
                    "not one of its modules, do not seed inside of it, and leave checkpoint's "
                    "preserve_rng_state=True"
                )
            return int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._latest = _packed(_combined(state, _AFTER_SITE))
        torch.default_generator.manual_seed(self._latest)
        return mix(state)

    def _state(self) -> int | None:
        """Return the state of the chain at this moment; None where none is under way."""
        seed = torch.initial_seed()
        return seed if seed == self._latest or _is_ours(seed) else None

    def drop(self, site: Site, x: Tensor, p: float) -> Tensor:
        """Return this rank's tensor without the elements dropped with probability p, others scaled.

        Raises:
            UsageError: nothing is known of how the ranks divide ``x``.
        """
        key = self.key()
        if isinstance(x, StageProxy) or self._left_out:
            return x  # its values are on another stage, or a trial is under way
        self._dropped = True
        if p == 1.0:
            return x * 0.0
        partition = partition_of(site, self.layouts, self._ranks)
        rank = self._ranks.rank
        with torch.no_grad():
            keep = keep_mask(key, x.shape, p, partition=partition, rank=rank, device=x.device)
        return x * keep * (1.0 / (1.0 - p))

    def _masked(self, name: str, module: nn.Module) -> AbstractContextManager[object]:
        """Return the context in which a module drops by masks; evaluation costs nothing."""
        if not module.training:
            return nullcontext()
        sites = count()  # of this call
        return Dropping(lambda x, p: self.drop(Site(name, next(sites)), x, p))

    def close(self) -> None:
        """Give modules their own dropout back."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            release(module)
        self._handles, self._modules, self._staged = [], [], ()

    @_disable_dynamo  # the hooks of a block that a script has compiled are compiled, too
    def _enter_block(self, module: nn.Module, args: Any) -> None:
        self._entered[module] = self._state()

    @_disable_dynamo
    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        state = self._entered.pop(module, None)
        if state is not None:
            self._latest = _packed(_combined(state, _AFTER_BLOCK))
            rng.seed_torch(self._latest)  # of devices, too


def _packed(state: int) -> int:
    """Return a seed with the upper bits of a state, and check bits below."""
    upper = state >> _CHECK_BITS
    return upper << _CHECK_BITS | _check(upper)


def _is_ours(seed: int) -> bool:
    return _check(seed >> _CHECK_BITS) == seed % (1 << _CHECK_BITS)


def _check(upper: int) -> int:
    return _combined(upper, _CHECK) % (1 << _CHECK_BITS)


# --- all other random draws: the same numbers on the ranks that share layers ---

# Stochastic depth, LayerDrop, noise: a rank that draws other numbers takes another path, or
# computes a share of another activation. So a forward begins with the generators of the axis's
# first rank, as long as forwards draw something. A model that draws nothing costs a comparison of
# states, and in the first forward a broadcast.


class AlikeDraws(Uncopied):
    """Keeps the random generators of one axis alike in the forwards of a model."""

    def __init__(self, ranks: Communicator, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._drew = {True: True, False: True}  # in training, in evaluation
        self._model: nn.Module | None = None

    def attach(self, model: nn.Module) -> None:
        """Begin, with the forwards of a model; on one rank alone there is nothing to do."""
        if self._ranks.size > 1:
            self._model = uncompiled(model)
            surround(self._model, self.during)

    def close(self) -> None:
        """End."""
        if self._model is not None:
            release(self._model)
            self._model = None

    @contextmanager
    def during(self, module: nn.Module) -> Iterator[None]:
        """Context of a forward that all ranks of the axis run.

        Raises:
            UsageError: ranks drew different numbers, in a forward after one in the same mode that
                drew nothing.
        """
        training = module.training
        shared = self._drew[training]
        if shared:
            self._share()
        before = _states()
        yield
        drew = not _equal(before, _states())
        self._drew[training] = drew = self._agreed(drew) if shared else drew
        if drew and not shared:
            self._check()

    def _agreed(self, drew: bool) -> bool:
        """Return whether any rank drew: another thread of one process may have, as a tracker's."""
        flag = torch.tensor(drew, dtype=torch.uint8, device=self._device)
        self._ranks.all_reduce(flag, reduction="max", label="whether a forward drew").wait()
        return bool(flag)

    def _share(self) -> None:
        """Give every rank the states of the first one."""
        states = dict(sorted(rng.capture().items()))
        held = [state.flatten().view(torch.uint8) for state in states.values()]
        joined = torch.cat(held).to(self._device)
        self._ranks.broadcast(joined, 0, label="states of random generators").wait()
        parts = torch.split(joined.cpu(), [each.numel() for each in held])
        rng.restore(
            {
                key: part.clone().view(state.dtype).view_as(state)
                for (key, state), part in zip(states.items(), parts, strict=True)
            }
        )

    def _check(self) -> None:
        states = [repr(state.tolist()) for _, state in sorted(rng.capture().items())]
        if differing(states, self._ranks.axis, doing="random generators"):
            raise UsageError(
                "expected the ranks that share layers to draw the same random numbers in a "
                "forward, found generators in different states: this forward drew and the one "
                "before did not; seed the ranks of a cell alike (set_seed without "
                "device_specific), or draw in every forward"
            )


def _states() -> list[Any]:
    """Return the states of all generators as they are, which is cheaper than ``rng.capture``."""
    numpy = sys.modules.get("numpy")
    numbers = () if numpy is None else numpy.random.get_state()
    found = [random.getstate(), torch.get_rng_state(), *numbers]
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        found.append(torch.get_device_module(device).get_rng_state())
    return found


def _equal(before: list[Any], after: list[Any]) -> bool:
    """Whether nothing was drawn; NumPy may have been imported meanwhile."""
    with torch._C.DisableTorchFunction():  # whoever looks on looks for the script's comparisons
        return len(before) == len(after) and all(
            bool((a == b).all()) if hasattr(a, "all") else a == b
            for a, b in zip(before, after, strict=True)
        )
