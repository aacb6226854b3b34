"""The named mesh: ranks laid out on axes, each axis with its own process groups.

Rank order follows the order of the axes: the first axis varies fastest, so its ranks are neighbours
and share a host where they can.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch.distributed as dist

from drivetrain.config.outline import check_axes
from drivetrain.errors import ConfigError
from drivetrain.runtime.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis of the mesh, seen from one rank.

    Attributes:
        name: for example ``dp``.
        size: number of ranks along the axis.
        rank: this rank's index along the axis.
        ranks: the global ranks of this rank's line along the axis.
        hosts: host name of each of these ranks; of its island, where the run declares islands.
        group: the process group of the line; None when the size is 1 or nothing was started.
        streams: numbers for the senders on the group, to tell their messages apart; every rank must
            take numbers in the same order.
        places: the index in the group of each of the ranks, where the group has more ranks than
            the axis; empty where both have the same.
        first: index of the first rank on the axis of which this one is a group of neighbors.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    group: dist.ProcessGroup | None = None
    streams: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    places: tuple[int, ...] = ()
    first: int = 0

    @property
    def position(self) -> int:
        """This rank's index along the whole axis, of which this one may be a group of neighbors."""
        return self.first + self.rank

    @property
    def spans_hosts(self) -> bool:
        """Whether the axis crosses a network."""
        return len(set(self.hosts)) > 1

    @property
    def alone(self) -> "Axis":
        """This rank by itself, as the near level where every host has one rank of the axis."""
        return _some(self, f"{self.name}.alone", [self.rank])


def subset(axis: Axis, chosen: Sequence[int], stream: int) -> Axis:
    """Return some of the ranks of an axis, which send messages on the group of all of them.

    No other rank takes part, and nothing is started.

    Args:
        axis: all ranks.
        chosen: their indices on the axis, in ascending order; this rank is among them.
        stream: the number for the sender on the group, taken by all ranks of the axis.
    """
    found = _some(axis, axis.name, chosen)
    streams = itertools.repeat(stream)
    return replace(found, group=axis.group, streams=streams, places=tuple(chosen), first=axis.first)


def _some(axis: Axis, name: str, chosen: Sequence[int], first: int = 0) -> Axis:
    """Return an axis of some ranks of another one, by their indices there; not started."""
    return Axis(
        name=name,
        size=len(chosen),
        rank=list(chosen).index(axis.rank),
        ranks=tuple(axis.ranks[each] for each in chosen),
        hosts=tuple(axis.hosts[each] for each in chosen),
        first=first,
    )


class HostLevels(NamedTuple):
    """An axis over hosts, seen from one rank, as two axes.

    Attributes:
        near: the ranks on this rank's host.
        far: the ranks at this rank's place on each host.
    """

    near: Axis
    far: Axis


class Mesh(dict[str, Axis]):
    """The axes of a run by name, the closest first.

    Args:
        axes: the axes, seen from one rank.
        lines: the lines of all ranks along each axis; None: the axes hold the whole world.
    """

    def __init__(
        self,
        axes: Mapping[str, Axis],
        lines: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
    ) -> None:
        super().__init__(axes)
        self._given_lines = lines
        self._started: dict[tuple[str, int], Axis] = {}
        self._parts: dict[str, Axis] = {}

    @classmethod
    def build(cls, sizes: Mapping[str, int], world: World) -> "Mesh":
        """Lay the world out on axes and start a process group per line of each axis.

        Collective: every rank must call it with the same sizes.

        Raises:
            ConfigError: the sizes do not multiply to the world's size.
        """
        mesh = cls.plan(sizes, world)
        for name, axis in mesh.items():
            mesh[name] = _start(axis, lines_along(name, sizes), world)
        return mesh

    @classmethod
    def plan(cls, sizes: Mapping[str, int], world: World) -> "Mesh":
        """Lay the world out on axes without starting anything, as ``launch --dry-run`` shows it.

        Raises:
            ConfigError: the sizes do not multiply to the world's size.
        """
        check_axes(sizes, world.size)
        return cls({name: _axis_of(name, lines_along(name, sizes), world) for name in sizes})

    def neighbors(self, name: str, size: int) -> Axis:
        """Return this rank's group of ``size`` neighbors on an axis, without starting anything.

        Raises:
            ConfigError: the axis cannot be cut into such groups.
        """
        axis = self[name]
        if size < 1 or axis.size % size:
            raise ConfigError(
                f"expected a number of neighbors that divides the {axis.size} ranks of the axis "
                f"{name!r}, found {size}; change it, or the number of ranks"
            )
        start = axis.rank - axis.rank % size
        first = axis.position - axis.rank + start
        return self._part(_some(axis, f"{name}.near", range(start, start + size), first))

    def start_neighbors(self, name: str, size: int, world: World) -> Axis:
        """Return this rank's group of neighbors with a process group. Collective the first time.

        Raises:
            ConfigError: the axis cannot be cut into such groups.
        """
        groups = neighbors_of(self._lines(name), size)
        return self._start_once(self.neighbors(name, size), groups, world)

    def across(self, name: str, size: int) -> Axis:
        """Return the ranks at the same place as this rank, one rank in each group of neighbors.

        The axis is cut into groups of ``size`` neighbors; with shards inside of the groups, these
        ranks hold replicas of one shard. Nothing is started.

        Raises:
            ConfigError: the axis cannot be cut into such groups.
        """
        axis, index = self[name], self.neighbors(name, size).rank
        return self._part(_some(axis, f"{name}.far", range(index, axis.size, size)))

    def name_links(self, name: str) -> None:
        """Name the two kinds of links on an axis whose ranks send to one another directly.

        ``NAME.near`` are the ranks of the axis on this rank's host, wherever they stand in the
        line; ``NAME.far`` are all of them. On one host there is one kind of link, and nothing is
        named.
        """
        axis = self[name]
        if not axis.spans_hosts:
            return
        here = [at for at, host in enumerate(axis.hosts) if host == axis.hosts[axis.rank]]
        self._part(_some(axis, f"{name}.near", here))
        self._part(replace(axis, name=f"{name}.far"))

    def inside(self, name: str, group: Axis) -> "Mesh":
        """Return the mesh of one group of neighbors on an axis, for a strategy inside of the group.

        The other axes stay as they are.

        Args:
            name: of the axis.
            group: of ``neighbors`` or ``start_neighbors``.
        """
        lines = self._lines_inside(name, group.size)
        return Mesh({**self, name: replace(group, name=name)}, lines)

    def around(self, name: str, group: Axis, world: World) -> Axis:
        """Return all ranks of the mesh of ``inside``, in ascending order; nothing is started.

        Where the mesh has no other axis, they are the group itself.
        """
        if len(self) == 1:
            return group
        blocks = connected(self._lines_inside(name, group.size))
        return self._part(_axis_of(f"{group.name}.all", blocks, world))

    def start_around(self, name: str, group: Axis, world: World) -> Axis:
        """Return the ranks of ``around`` with a process group. Collective the first time."""
        axis = self.around(name, group, world)
        if axis is group:
            return group
        return self._start_once(axis, connected(self._lines_inside(name, group.size)), world)

    def _lines_inside(self, name: str, size: int) -> dict[str, list[tuple[int, ...]]]:
        """Return the lines along each axis, those of one axis cut into groups of neighbors."""
        lines = {each: list(self._lines(each)) for each in self}
        return {**lines, name: list(neighbors_of(lines[name], size))}

    def _part(self, axis: Axis) -> Axis:
        self._parts[axis.name] = axis
        return axis

    def line(self, name: str) -> Axis:
        """Return the axis of this name, or the part of an axis that a strategy has asked for."""
        return self._parts[name] if name in self._parts else self[name]

    def start_across(self, name: str, size: int, world: World) -> Axis:
        """Return the axis of ``across`` with a process group. Collective the first time.

        Raises:
            ConfigError: the axis cannot be cut into such groups.
        """
        groups = (line[index::size] for line in self._lines(name) for index in range(size))
        return self._start_once(self.across(name, size), groups, world)

    def start_again(self, name: str, count: int, world: World) -> tuple[dist.ProcessGroup, ...]:
        """Start more process groups of this rank's line, whose messages do not wait for each other.

        Collective over all ranks of the run; the axis has more than one rank.
        """
        lines = list(self._lines(name))
        started = (_start(self[name], lines, world).group for _ in range(count))
        return tuple(group for group in started if group is not None)

    def per_host(self, name: str, world: World) -> int:
        """Return how many neighbors on an axis share a host: on every host, on every line.

        Looks at the lines of all ranks, so all ranks get the same answer or the same error.

        Raises:
            ConfigError: hosts have different numbers of ranks, or those of one are not neighbors.
        """
        lines = list(self._lines(name))
        expected = _runs(lines[0], world)[0][1]
        for line in lines:
            runs = _runs(line, world)
            in_a_row = len(runs) == len(dict(runs))
            if not in_a_row or any(count != expected for _, count in runs):
                shown = "; ".join(_placed(each, world) for each in dict.fromkeys((lines[0], line)))
                raise ConfigError(
                    f"expected every host to hold equally many ranks of the axis {name!r}, in a "
                    f"row, found {shown}; start equally many ranks on every host, or give the "
                    "number of neighbors instead of leaving it to the hosts"
                )
        return expected

    def levels(self, name: str, world: World) -> HostLevels | None:
        """Return the two levels of an axis over hosts, without starting anything.

        None where there are no two: on one host, with one rank of the axis per host, or with hosts
        that hold different numbers of ranks.
        """
        try:
            count = self.per_host(name, world)
        except ConfigError:
            return None
        if count in (1, self[name].size):
            return None
        return HostLevels(self.neighbors(name, count), self.across(name, count))

    def start_levels(self, name: str, world: World) -> HostLevels | None:
        """Return the levels of an axis with process groups. Collective the first time."""
        levels = self.levels(name, world)
        if levels is None:
            return None
        size = levels.near.size
        near = self.start_neighbors(name, size, world)
        return HostLevels(near, self.start_across(name, size, world))

    def _lines(self, name: str) -> Iterable[tuple[int, ...]]:
        if self._given_lines is not None:
            return self._given_lines[name]
        return lines_along(name, {each: axis.size for each, axis in self.items()})

    def _start_once(self, axis: Axis, groups: Iterable[tuple[int, ...]], world: World) -> Axis:
        """Start the groups of a part of an axis, unless that was done before."""
        key = (axis.name, axis.size)
        if key not in self._started:
            self._started[key] = _start(axis, groups, world)
        return self._started[key]

    def __missing__(self, name: str) -> Axis:
        raise KeyError(f"no axis {name!r} in this mesh; axes: {list(self)}")

    def __repr__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.values())


def _axis_of(name: str, lines: Iterable[tuple[int, ...]], world: World) -> Axis:
    """Return the line of this rank, not started."""
    line = next(line for line in lines if world.rank in line)
    hosts = tuple(world.islands[rank] for rank in line)
    return Axis(name=name, size=len(line), rank=line.index(world.rank), ranks=line, hosts=hosts)


def _runs(line: tuple[int, ...], world: World) -> list[tuple[str, int]]:
    """Return the hosts that a line passes through, each with how many ranks follow each other."""
    hosts = itertools.groupby(world.islands[rank] for rank in line)
    return [(host, len(list(run))) for host, run in hosts]


def _placed(line: tuple[int, ...], world: World) -> str:
    counts = ", ".join(f"{count} on {host!r}" for host, count in _runs(line, world))
    return f"along ranks {', '.join(map(str, line))}: {counts}"


def _start(axis: Axis, lines: Iterable[tuple[int, ...]], world: World) -> Axis:
    """Start the process groups of an axis; all ranks start all lines, in the same order."""
    if axis.size == 1:
        return axis
    mine = None
    for line in lines:
        group = dist.new_group(list(line), timeout=world.timeout)
        if world.rank in line:
            mine = group
    return replace(axis, group=mine)


# --- the lines of a mesh ---


def lines_along(name: str, sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """Yield the lines of global ranks along one axis."""
    cumulative = itertools.accumulate([1, *sizes.values()], lambda a, b: a * b)
    strides = dict(zip(sizes, cumulative, strict=False))
    along = {axis: range(0, strides[axis] * size, strides[axis]) for axis, size in sizes.items()}
    mine = along.pop(name)
    for corner in itertools.product(*reversed(along.values())):
        yield tuple(range(sum(corner), sum(corner) + mine.stop, mine.step))


def neighbors_of(lines: Iterable[tuple[int, ...]], size: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ``size`` neighbors into which lines are cut."""
    for line in lines:
        for start in range(0, len(line), size):
            yield line[start : start + size]


def connected(lines: Mapping[str, Iterable[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that lines of any axis connect, each in ascending order."""
    found: dict[int, set[int]] = {}
    for line in itertools.chain.from_iterable(lines.values()):
        block = set(line).union(*(found.get(rank, ()) for rank in line))
        found.update(dict.fromkeys(block, block))
    return sorted({tuple(sorted(block)) for block in found.values()})
