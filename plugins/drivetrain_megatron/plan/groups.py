"""Finds which linear layers of a block can be divided together, and in which ways to try it.

A group is one row-parallel layer and the column-parallel layers whose features flow into it: query,
key and value into the output projection, gate and up into down (Shoeybi et al. 2019, arXiv
1909.08053, section 3). Between them the ranks need no communication if each feature of the row's
input depends on features of the same rank only. Whether that is so is not decided here: every way
that the shapes allow is proposed, and the verifier runs it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain_megatron.plan.provenance import LinearUse
from drivetrain_megatron.tensor.partition import Partition, even, grouped_heads, joined, units


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are divided together.

    Attributes:
        columns: names of the column-parallel layers, in the order of their calls.
        row: name of the row-parallel layer.
    """

    columns: tuple[str, ...]
    row: str


@dataclass(frozen=True, slots=True)
class GroupDivision:
    """One way to divide a group.

    Attributes:
        columns: how the output features of each column-parallel layer are divided.
        row: how the input features of the row-parallel layer are divided.
        numbers: sizes that the block's own code may count with, such as its number of heads, and
            what they are on each rank.
    """

    columns: Mapping[str, Partition]
    row: Partition
    numbers: Mapping[int, tuple[int, ...]]


def find_groups(uses: Mapping[str, LinearUse]) -> list[LayerGroup]:
    """Return the groups of a block.

    A layer that others feed becomes their row, unless one of them, or it, is in a group already.
    Layers that more of them feed come first, then the order of calls decides: what is added to a
    query (LoRA) is a column with it, not a pair by itself. Layers that are called more than once in
    a block stay whole.
    """
    groups: list[LayerGroup] = []
    taken: set[str] = set()
    for use in sorted(uses.values(), key=lambda use: -len(use.fed_by)):
        members = {*use.fed_by, use.name}
        once = all(uses[name].calls == 1 for name in members)
        if use.fed_by and once and not members & taken:
            groups.append(LayerGroup(tuple(name for name in uses if name in use.fed_by), use.name))
            taken |= members
    order = list(uses)
    return sorted(groups, key=lambda group: order.index(group.row))


def ways(group: LayerGroup, uses: Mapping[str, LinearUse], ranks: int) -> Iterator[GroupDivision]:
    """Yield the ways to divide a group that its shapes allow, the most specific first.

    Raises:
        ConfigError: key-value heads do not fit the number of ranks.
    """
    yield from _by_queries(group, uses, ranks)
    yield from _by_heads(group, uses, ranks)
    yield from _by_features(group, uses, ranks)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a column-parallel layer's output that stands for one projection.

    Attributes:
        layer: name of the layer.
        size: its features.
    """

    layer: str
    size: int


def _segments(group: LayerGroup, uses: Mapping[str, LinearUse]) -> list[_Segment]:
    """Return the projections of a group: a packed layer has several."""
    found = []
    for name in group.columns:
        use = uses[name]
        sizes = [stop - start for start, stop in sorted(use.parts)]
        covered = sum(sizes) == use.outputs and len(sizes) > 1
        found += [_Segment(name, size) for size in (sizes if covered else [use.outputs])]
    return found


def _by_queries(
    group: LayerGroup, uses: Mapping[str, LinearUse], ranks: int
) -> Iterator[GroupDivision]:
    """Divide grouped-query attention: some projections have the row's width, others fewer heads."""
    width = uses[group.row].inputs
    segments = _segments(group, uses)
    sizes = {segment.size for segment in segments}
    features = {uses[name].heads[-1] for name in group.columns if uses[name].heads}
    if len(sizes) != 2 or max(sizes) != width or width % min(sizes) or len(features) != 1:
        return
    (head_dim,) = features
    if min(sizes) % head_dim:
        return
    heads, kv_heads = width // head_dim, min(sizes) // head_dim
    if kv_heads < ranks and len(segments) > len(group.columns):
        return  # ranks that share a kv head would share a part of a packed weight
    q, kv = grouped_heads(0, heads, kv_heads, head_dim, ranks)
    numbers = _local({width: q, min(sizes): kv}, {heads: (q, head_dim), kv_heads: (kv, head_dim)})
    if kv_heads < ranks:
        numbers[heads // kv_heads] = tuple(size // head_dim for size in q.local_sizes)
    yield _assembled(segments, {width: q, min(sizes): kv}, q, numbers)


def _by_heads(
    group: LayerGroup, uses: Mapping[str, LinearUse], ranks: int
) -> Iterator[GroupDivision]:
    """Divide by heads: each projection has the row's width, or a multiple of it inside a head."""
    width = uses[group.row].inputs
    segments = _segments(group, uses)
    shapes = {uses[name].heads for name in group.columns if uses[name].heads}
    counts = {count for shape in shapes for count in shape[:-1] if width % count == 0}
    for count in sorted(counts, reverse=True):
        if any(segment.size % count for segment in segments):
            continue
        row = units(0, width, width // count, ranks)
        whole = {size: units(0, size, size // count, ranks) for size in {s.size for s in segments}}
        numbers = _local({**whole, width: row}, {count: (row, width // count)})
        yield _assembled(segments, whole, row, numbers)
        # Or several parts one after the other, each with all heads.
        parts = {size: joined([row] * (size // width)) for size in whole if size % width == 0}
        if parts.keys() - {width}:
            yield _assembled(segments, {**whole, **parts}, row, numbers)


def _by_features(
    group: LayerGroup, uses: Mapping[str, LinearUse], ranks: int
) -> Iterator[GroupDivision]:
    """Divide features that are independent of each other, as after an activation."""
    width = uses[group.row].inputs
    segments = _segments(group, uses)
    if all(segment.size == width for segment in segments):
        row = even(0, width, ranks)
        yield _assembled(segments, {width: row}, row, _local({width: row}, {}))


def _assembled(
    segments: Sequence[_Segment],
    partitions: Mapping[int, Partition],
    row: Partition,
    numbers: Mapping[int, tuple[int, ...]],
) -> GroupDivision:
    """Return the division in which projections of one size are divided alike."""
    layers: dict[str, list[Partition]] = {}
    for segment in segments:
        layers.setdefault(segment.layer, []).append(partitions[segment.size])
    columns = {
        name: parts[0] if len(parts) == 1 else joined(parts) for name, parts in layers.items()
    }
    return GroupDivision(columns, row, numbers)


def _local(
    widths: Mapping[int, Partition], counts: Mapping[int, tuple[Partition, int]]
) -> dict[int, tuple[int, ...]]:
    """Return sizes and numbers of heads, each with its values on the ranks."""
    local = {size: partition.local_sizes for size, partition in widths.items()}
    for count, (partition, unit) in counts.items():
        local[count] = tuple(size // unit for size in partition.local_sizes)
    return local
