"""Which ranges of one dim of a tensor each rank holds, and how to cut and join along them."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from drivetrain.collectives.volume import chunk_bounds
from drivetrain.errors import ConfigError, UsageError

IndexRange: TypeAlias = tuple[int, int]
"""A half-open range of indices, (start, stop)."""


@dataclass(frozen=True)
class Partition:
    """The ranges of one dim that each rank holds, in their order on the rank.

    A rank has several ranges of a packed weight (fused q, k, v: a part of each). Several ranks may
    hold the same range (replicated kv heads); no two ranges overlap otherwise. A rank may hold
    nothing.

    Attributes:
        dim: which dim is cut; negative ones count from the end.
        size: global extent of the dim.
        ranges: per rank, its non-empty half-open ranges; each index is in one range, which one or
            several ranks have.
    """

    dim: int
    size: int
    ranges: tuple[tuple[IndexRange, ...], ...]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.ranges)

    @functools.cached_property
    def local_sizes(self) -> tuple[int, ...]:
        """How many indices each rank holds."""
        return tuple(sum(stop - start for start, stop in mine) for mine in self.ranges)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether the ranks' shares, one after the other, are the whole dim."""
        flat = list(itertools.chain.from_iterable(self.ranges))
        return flat == sorted(flat) and sum(self.local_sizes) == self.size

    @functools.cached_property
    def bounds(self) -> tuple[IndexRange, ...]:
        """Where each rank's share lies among the shares of all ranks, one after the other."""
        return tuple(itertools.pairwise(itertools.accumulate(self.local_sizes, initial=0)))

    def here(self, words: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return the local index of each word, 0 for words of other ranks, and a mask of these.

        Each rank has one range, in ascending order.
        """
        start, stop = self.bounds[rank]
        elsewhere = (words < start) | (words >= stop)
        return (words - start).masked_fill(elsewhere, 0), elsewhere

    def local_shape(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a rank's share of a tensor of this global shape."""
        local = list(shape)
        local[self.dim] = self.local_sizes[rank]
        return tuple(local)

    @torch.no_grad()
    def disown(self, share: Tensor, rank: int) -> Tensor:
        """Set to zero, in place, the ranges that an earlier rank holds too; return the share."""
        if not self.is_plain:
            for part, mine in zip(self._parts(share, rank), self.ranges[rank], strict=True):
                if any(mine in ranges for ranges in self.ranges[:rank]):
                    part.zero_()
        return share

    def views(self, whole: Tensor, rank: int) -> list[Tensor]:
        """Return views of a whole tensor, one for each of a rank's ranges.

        Raises:
            UsageError: the tensor has another extent.
        """
        if whole.size(self.dim) != self.size:
            raise UsageError(
                f"expected a tensor of extent {self.size} in dim {self.dim}, found shape "
                f"{tuple(whole.shape)}"
            )
        return [whole.narrow(self.dim, a, b - a) for a, b in self.ranges[rank]]

    @torch.no_grad()
    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Return a contiguous copy of a rank's share of a whole tensor, outside of autograd."""
        share = whole.new_empty(self.local_shape(rank, whole.shape))
        for part, view in zip(self._parts(share, rank), self.views(whole, rank), strict=True):
            part.copy_(view)
        return share

    @torch.no_grad()
    def put(self, whole: Tensor, share: Tensor, rank: int, *, add: bool = False) -> None:
        """Write a rank's share to its place in a whole tensor, or add it there."""
        for part, view in zip(self._parts(share, rank), self.views(whole, rank), strict=True):
            view.add_(part) if add else view.copy_(part)

    def _parts(self, share: Tensor, rank: int) -> Sequence[Tensor]:
        """Return the views of a share that stand for its ranges."""
        return share.split([stop - start for start, stop in self.ranges[rank]], self.dim)  # type: ignore[no-untyped-call,no-any-return]


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """How a parameter lies on the tensor-parallel axis.

    Attributes:
        shape: the global shape, as the user's model has it.
        partition: which part each rank of the axis holds; None if all hold the whole.
        partial: whether each rank's gradient is a part of a sum over the axis.
    """

    shape: tuple[int, ...]
    partition: Partition | None = None
    partial: bool = False

    @property
    def is_summed(self) -> bool:
        """Whether gradients are summed over the axis: parts of a sum, or copies of a range."""
        cut = self.partition
        return self.partial or (cut is not None and len(set(cut.ranges)) < cut.ranks)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part that one rank of the axis holds."""
        cut = self.partition
        return self.shape if cut is None else cut.local_shape(rank, self.shape)

    def saves(self, rank: int) -> bool:
        """Whether this rank saves its part: the first holder on the axis does."""
        cut = self.partition
        return rank == (0 if cut is None else cut.ranges.index(cut.ranges[rank]))


@functools.lru_cache(maxsize=1024)
def even(dim: int, size: int, ranks: int) -> Partition:
    """Return the even cut of a dim: lengths differ by at most 1, some may be empty."""
    return units(dim, size, 1, ranks)


def alike(size: int, ranks: int) -> Partition:
    """Return the cut of dim 0 of which every rank holds all."""
    return Partition(0, size, (((0, size),),) * ranks)


def units(dim: int, size: int, unit: int, ranks: int) -> Partition:
    """Return the cut of a dim at multiples of a unit, such as a head's features."""
    return _of_units(dim, unit, size // unit, chunk_bounds(size // unit, ranks))


def _of_units(dim: int, unit: int, count: int, cut: Sequence[IndexRange]) -> Partition:
    """Return the cut of a dim of several units into one range of these for each rank."""
    ranges = tuple(((unit * a, unit * b),) if a < b else () for a, b in cut)
    return Partition(dim, unit * count, ranges)


def joined(parts: Sequence[Partition]) -> Partition:
    """Return the cut of a packed dim: segments one after the other, each with its own partition."""
    edges = [0, *itertools.accumulate(part.size for part in parts)]
    ranges = [
        tuple(
            (edge + start, edge + stop)
            for edge, part in zip(edges, parts, strict=False)
            for start, stop in part.ranges[rank]
        )
        for rank in range(parts[0].ranks)
    ]
    return Partition(parts[0].dim, edges[-1], tuple(ranges))


def packed(dim: int, segments: Sequence[int], ranks: int, *, unit: int = 1) -> Partition:
    """Return the cut of a packed dim where every rank holds an even part of each segment.

    Segments are given by their extents, such as those of q, k and v, and cut at multiples of the
    unit.
    """
    return joined([units(dim, segment, unit, ranks) for segment in segments])


def grouped_heads(
    dim: int, heads: int, kv_heads: int, head_dim: int, ranks: int
) -> tuple[Partition, Partition]:
    """Return the cuts of the q rows and the kv rows of grouped-query attention.

    Every rank gets the kv heads that its q heads use, and no others. With as many kv heads as ranks
    or more they are cut, and the q heads follow; with fewer, each kv head is replicated over
    ``ranks / kv_heads`` ranks, which share its q heads out (Ainslie et al. 2023, arXiv 2305.13245).
    A rank without q heads holds no kv head.

    Args:
        dim: which dim of the weights counts features of heads.
        heads: q heads.
        kv_heads: kv heads, which divide the q heads: each serves ``heads / kv_heads`` neighbors.
        head_dim: features of one head.
        ranks: how many ranks.

    Raises:
        ConfigError: there are fewer kv heads than ranks and they do not divide the ranks.
    """
    if kv_heads < ranks and ranks % kv_heads:
        allowed = sorted({*range(1, kv_heads + 1), *range(kv_heads, heads + 1, kv_heads)})
        raise ConfigError(
            f"expected at most {kv_heads} ranks, one or more kv heads for each, or a multiple of "
            f"{kv_heads}, so that every kv head is on as many ranks; found {ranks}; for {heads} "
            f"heads with {kv_heads} kv heads take one of {allowed} ranks"
        )
    group = heads // kv_heads
    if kv_heads >= ranks:
        kv = chunk_bounds(kv_heads, ranks)
        q = [(group * a, group * b) for a, b in kv]
    else:
        copies = ranks // kv_heads
        shares = chunk_bounds(group, copies)
        q = [(group * i + a, group * i + b) for i in range(kv_heads) for a, b in shares]
        kv = [(rank // copies, rank // copies + (a < b)) for rank, (a, b) in enumerate(q)]
    return _of_units(dim, head_dim, heads, q), _of_units(dim, head_dim, kv_heads, kv)


def check_words(words: Tensor, size: int, what: str) -> None:
    """Let words that do not exist raise, which no rank would miss otherwise.

    Raises:
        UsageError: a word is negative, or too large. On an accelerator the device reports it.
    """
    if words.numel() == 0:
        return
    low, high = words.aminmax()
    if words.device.type != "cpu":
        torch._assert_async((low >= 0) & (high < size), f"{what} must be from 0 to {size - 1}")
    elif low < 0 or high >= size:
        raise UsageError(
            f"expected {what} from 0 to {size - 1}, found some from {int(low)} to {int(high)}; "
            "check the tokenizer against the size of the model's vocabulary"
        )
