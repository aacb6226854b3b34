"""Bytes for activations: Shoeybi et al. 2019, Narayanan et al. 2021, Korthikanti et al. 2022.

Let A be the bytes of an activation (rows x tokens x width x bytes per number) and t the number of
tensor-parallel ranks. In a ring, one rank sends for an all-reduce of S bytes 2 S (t-1)/t, an
all-gather or a reduce-scatter S (t-1)/t:

==================  ==============================  ============================  =============
part                forward                         backward                      bytes per rank
==================  ==============================  ============================  =============
a group             1 all-reduce                    1 all-reduce                  4 A (t-1)/t
the same, sharded   1 all-gather, 1 reduce-scatter  1 all-gather, 1 r.-scatter    4 A (t-1)/t
a layer by itself   1 all-gather, or 1 all-reduce   the other one                 3 A (t-1)/t
a layer             its two groups: attention, MLP                                8 A (t-1)/t
words come in       1 all-reduce                    nothing                       2 A (t-1)/t
words go out        nothing                         1 all-reduce                  2 A (t-1)/t
cross entropy       3 all-reduces of a number       nothing                       6 B (t-1)/t
                    per token, B bytes
shards, once        1 all-gather after the blocks   1 all-gather before them      2 A (t-1)/t
a pipeline's cut    A to the next stage             A to the stage before         A each way
==================  ==============================  ============================  =============

Groups, words and cross entropy are section 3 of Shoeybi et al. 2019 (arXiv 1909.08053); the sum per
layer is section 3.2 of Narayanan et al. 2021 (arXiv 2104.04473); shards of the sequence, which
send the same bytes, are section 4.2.2 of Korthikanti et al. 2022 (arXiv 2205.05198). The functions
give the integers that (t-1)/t stands for when a size is no multiple of t. Computing a block again
in backward adds its forward once more.
"""

from collections import Counter
from dataclasses import dataclass, replace

from drivetrain.collectives import sent_elements
from drivetrain.collectives.volume import Operation, chunk_bounds
from drivetrain_megatron.tensor.partition import Partition

_STATISTICS = 3
"""Of a cross entropy: maximum, sum of exponentials, and the logit of the target."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation between two layers, of one micro-batch; the width is that of a token."""

    rows: int
    tokens: int
    width: int
    itemsize: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.tokens * self.width

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.itemsize

    def shard(self, line: "RanksOfAxis") -> "Activation":
        """Return the part that a rank holds when tokens are divided."""
        start, stop = chunk_bounds(self.tokens, line.size)[line.rank]
        return replace(self, tokens=stop - start)


@dataclass(frozen=True, slots=True)
class RanksOfAxis:
    """The ranks of an axis, seen from the rank that sends."""

    size: int
    rank: int = 0


def group(
    entering: Activation, leaving: Activation, line: RanksOfAxis, *, sharded: bool
) -> Counter[str]:
    """Return the bytes by operation of a column-parallel and the row-parallel layer after it.

    Column-parallel layers with the same input count once. ``sharded`` activations are shards of the
    sequence outside of the group.
    """
    if not sharded:
        return whole(entering, line) + whole(leaving, line)
    found: Counter[str] = Counter()
    for activation in (entering, leaving):  # gathered one way, scattered the other
        for operation in ("all_gather", "reduce_scatter"):
            found[operation] += _by_tokens(operation, activation, line)
    return found


def whole(activation: Activation, line: RanksOfAxis) -> Counter[str]:
    """Return the bytes of one sum over ranks: words that come in, or go out."""
    return all_reduce(activation.numel, activation.itemsize, line)


def cross_entropy(targets: int, itemsize: int, line: RanksOfAxis) -> Counter[str]:
    """Return the bytes of the loss of divided logits; label smoothing adds a third of it.

    The statistics of a target have the itemsize of the logits, at least that of fp32.
    """
    each = all_reduce(targets, itemsize, line)
    return Counter({operation: _STATISTICS * nbytes for operation, nbytes in each.items()})


def joined(activation: Activation, line: RanksOfAxis) -> Counter[str]:
    """Return the bytes of one end of the part of a model that works on shards of the sequence.

    The shards are joined after the last block, and those of the gradient before the first.
    """
    return Counter({"all_gather": _by_tokens("all_gather", activation, line)})


def all_reduce(numel: int, itemsize: int, line: RanksOfAxis) -> Counter[str]:
    """Return the bytes of one all-reduce."""
    elements = sent_elements("all_reduce", numel, size=line.size, rank=line.rank)
    return Counter({"all_reduce": elements * itemsize})


def all_gather(numel: int, itemsize: int, features: Partition, line: RanksOfAxis) -> Counter[str]:
    """Return the bytes of a gathering of so many numbers, whose last dim is cut like this."""
    each = numel // features.size
    chunks = [(start * each, stop * each) for start, stop in features.bounds]
    elements = sent_elements(
        "all_gather", each * features.bounds[-1][1], size=line.size, rank=line.rank, chunks=chunks
    )
    return Counter({"all_gather": elements * itemsize})


def _by_tokens(operation: Operation, activation: Activation, line: RanksOfAxis) -> int:
    each = activation.rows * activation.width
    bounds = chunk_bounds(activation.tokens, line.size)
    elements = sent_elements(
        operation,
        activation.numel,
        size=line.size,
        rank=line.rank,
        chunks=[(start * each, stop * each) for start, stop in bounds],
    )
    return elements * activation.itemsize
