"""Finds how the ranks divide the tensors of which a block drops elements.

A block runs in training mode once whole and once on ranks that are threads, with every dropout left
out. The input of each dropout then tells its layout: the same on all ranks, a shard of the
sequence, or the share of heads or features that some layer's partition says. Values are compared,
not only shapes.
"""

import copy
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError
from drivetrain_megatron.dropout.dropouts import (
    DropoutLayout,
    DropoutRecorder,
    Site,
    open_attentions,
)
from drivetrain_megatron.plan.divide import BlockPlan, divide
from drivetrain_megatron.plan.thread_ranks import run_emulated
from drivetrain_megatron.plan.trial import Trial, is_close, run_block
from drivetrain_megatron.tensor.partition import Partition, even
from drivetrain_megatron.tensor.sequence import Edges, TokenShards


def find_layouts(
    trial: Trial, plan: BlockPlan, ranks: int, tokens: TokenShards | None
) -> dict[Site, DropoutLayout]:
    """Return how the ranks divide each dropout's input, by site inside of the block.

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
        recorder = DropoutRecorder(block)
        with recorder.watching():
            run_block(block, trial.call, edges)
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
) -> Iterator[DropoutLayout]:
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
    """Return a partition of features as a partition of a dim that counts heads of features."""
    if not count or partition.size % count:
        return None
    unit = partition.size // count
    ranges = [[(a / unit, b / unit) for a, b in mine] for mine in partition.ranges]
    if any(edge % 1 for mine in ranges for pair in mine for edge in pair):
        return None
    return Partition(dim, count, tuple(tuple((int(a), int(b)) for a, b in mine) for mine in ranges))


def _fits(
    layout: DropoutLayout, expected: Sequence[Tensor], seen: Sequence[Sequence[Tensor]]
) -> bool:
    """Whether each rank saw, in every call, its share of the whole block's tensor."""
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
