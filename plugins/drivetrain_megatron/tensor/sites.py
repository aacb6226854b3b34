"""Finds where a model drops elements, and how the ranks divide what it drops them of.

A block runs in training mode once whole and once on emulated ranks, with every dropout left out.
What each dropout would see then tells: it is the same on all ranks, or a shard of the sequence, or
the share of heads or features that some layer's partition says. Values are compared, not only
shapes.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.collectives.solo import SoloCommunicator
from drivetrain.errors import ConfigError, UsageError
from drivetrain_megatron.pipeline.recording import to_device
from drivetrain_megatron.pipeline.substitution import without_values
from drivetrain_megatron.tensor.attention import attach_heads, keep_padded
from drivetrain_megatron.tensor.behavior import behavior_of
from drivetrain_megatron.tensor.divide import BlockPlan, divide
from drivetrain_megatron.tensor.dropping import Dropping
from drivetrain_megatron.tensor.edges import Edges, TokenShards
from drivetrain_megatron.tensor.emulated import run_emulated
from drivetrain_megatron.tensor.partition import Partition, even
from drivetrain_megatron.tensor.verify import Trial, is_close, run_block


@dataclass(frozen=True, slots=True)
class Site:
    """One place in the code that drops elements.

    Attributes:
        module: name of the innermost module that runs.
        index: how many dropouts the same call of the module had before.
    """

    module: str
    index: int


Layout: TypeAlias = Partition | TokenShards | None
"""What of a tensor a rank has: a share of heads or features, of tokens, or everything."""


@dataclass(slots=True)
class Layouts:
    """How the ranks divide what a model drops elements of.

    Attributes:
        blocks: names of the divided blocks; outside of them every rank has everything.
        found: by site inside of blocks.
    """

    blocks: tuple[str, ...] = ()
    found: dict[Site, Layout] = field(default_factory=dict)

    def add(self, block: str, found: Mapping[Site, Layout]) -> None:
        """Add what was found of a block; sites have names inside of it."""
        self.blocks = (*self.blocks, block)
        for site, layout in found.items():
            self.found[Site(f"{block}.{site.module}".strip("."), site.index)] = layout


def partition_of(site: Site, layouts: Layouts, ranks: Communicator) -> Partition | None:
    """Return how the ranks divide what a site drops elements of, right now.

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


class Recorder:
    """Notes what dropouts of a module would see, and leaves them out.

    Args:
        root: hooks stay on its modules until ``close``.
    """

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


def dropping_modules(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> frozenset[str]:
    """Return the names of modules that drop elements in training; the model is not changed.

    Args:
        model: whole, also on the meta device.
        args: example inputs.
        kwargs: the same by name.
    """
    recorder = Recorder(model)
    try:
        with without_values(model) as substitutes, recorder.watching(), torch.no_grad():
            model.train()
            given, named = to_device((tuple(args), dict(kwargs)), substitutes.device)
            model(*given, **named)
    finally:
        recorder.close()
    inside = {name for name, m in model.named_modules() if _is_attention(m)}
    return frozenset({site.module for site in recorder.seen} | inside)


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


def find_layouts(
    trial: Trial, plan: BlockPlan, ranks: int, tokens: TokenShards | None
) -> dict[Site, Layout]:
    """Return how the ranks divide what a block drops elements of, by site inside of the block.

    Args:
        trial: of the block.
        plan: how it is divided.
        ranks: how many ranks.
        tokens: how activations between groups are shards; None if they are whole.

    Raises:
        ConfigError: it is not to be told.
    """

    def recorded(communicator: Communicator, divided: bool) -> dict[Site, list[Tensor]]:
        edges = Edges(communicator, TokenShards() if tokens is not None else None)
        block = copy.deepcopy(trial.block).train()
        if divided:
            divide(block, plan, edges)
        open_attentions(block, communicator)
        recorder = Recorder(block)
        with recorder.watching():
            run_block(block, trial.call, trial.seeds, edges)
        return recorder.seen

    whole = run_emulated(1, lambda communicator: recorded(communicator, False))[0]
    if not whole:
        return {}
    parts = run_emulated(ranks, lambda communicator: recorded(communicator, True))
    found = {}
    for site, expected in whole.items():
        seen = [part.get(site, []) for part in parts]
        candidates = _candidates(trial.block, plan, ranks, tokens, expected[0])
        fitting = [each for each in candidates if _fits(each, expected, seen)]
        if not fitting:
            shapes = [[tuple(x.shape) for x in each] for each in seen]
            raise ConfigError(
                f"expected dropout {site.index} of {site.module!r} to be of something that is "
                f"whole on each rank, or divided as the layers around it, found shapes {shapes} "
                f"where one process has {[tuple(x.shape) for x in expected]}; leave these layers "
                "out of the plan, or give each dropout a module of its own"
            )
        found[site] = fitting[0]
    return found


def _candidates(
    block: nn.Module, plan: BlockPlan, ranks: int, tokens: TokenShards | None, whole: Tensor
) -> Iterator[Layout]:
    """Yield how the ranks may have divided a tensor."""
    yield None
    if tokens is not None and whole.dim() >= -tokens.dim:
        yield tokens
    partitions = [part for group in plan.groups for part in (*group.columns.values(), group.inputs)]
    for name in plan.attentions:
        partitions.append(even(0, block.get_submodule(name).num_heads, ranks))
    for partition in dict.fromkeys(partitions):
        for dim in range(-1, -whole.dim() - 1, -1):
            scaled = _scaled(partition, dim, whole.shape[dim])
            if scaled is not None:
                yield scaled


def _scaled(partition: Partition, dim: int, count: int) -> Partition | None:
    """Return the same cut of a dim that counts units, such as heads, of what is cut."""
    if not count or partition.size % count:
        return None
    unit = partition.size // count
    ranges = [[(a / unit, b / unit) for a, b in mine] for mine in partition.ranges]
    if any(edge % 1 for mine in ranges for pair in mine for edge in pair):
        return None
    return Partition(dim, count, tuple(tuple((int(a), int(b)) for a, b in mine) for mine in ranges))


def _fits(layout: Layout, expected: Sequence[Tensor], seen: Sequence[Sequence[Tensor]]) -> bool:
    """Whether each rank saw its share of what the whole block saw, in every call."""
    if any(len(mine) != len(expected) for mine in seen):
        return False
    for call, whole in enumerate(expected):
        partition = layout
        if isinstance(layout, TokenShards):
            partition = even(layout.dim, whole.shape[layout.dim], len(seen))
        for rank, mine in enumerate(seen):
            share = whole
            if isinstance(partition, Partition):
                if whole.shape[partition.dim] != partition.size:
                    return False
                share = partition.take(whole, rank)
            if not is_close(mine[call], share):
                return False
    return True


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
