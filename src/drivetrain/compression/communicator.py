"""The communicator whose channels between hosts are approximate, and islands of ranks.

Everything else between hosts is exact: maxima, buffers, the order of gradients, what a checkpoint
reads. Inside of a host all is exact anyway::

    near     the ranks of a host exchange sums of shares        exact
    far      ranks at the same place of each host               as the method of the link says
    near     the ranks of a host exchange their shares          exact

The islands of a run: groups of ranks with quick links among them, as a file declares.

Without a declaration, the ranks of one host are an island. Host names say less where a machine runs
several containers, or where one host has two groups of devices with a slow link between them. Then
``links.hardware`` names a description of hardware, and its ``host.devices`` is the size of islands.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import (
    Communicator,
    Handle,
    Parts,
    Route,
    connect_over_hosts,
    connecting,
    route_over_hosts,
)
from drivetrain.collectives.communicator import (
    First,
    GatherChannel,
    ReduceChannel,
    StagedHandle,
    SumChannel,
)
from drivetrain.collectives.facts import gather_facts
from drivetrain.collectives.ring import HierarchicalCommunicator
from drivetrain.collectives.volume import FlatSlice, SlicesByRank, far_pieces
from drivetrain.compression.compressor import FarReduction
from drivetrain.compression.error_feedback import (
    LinkChannel,
    ParkedState,
    SavedLinks,
)
from drivetrain.compression.methods import LinkMethods
from drivetrain.cost import Traffic
from drivetrain.errors import ConfigError, DrivetrainError, RankMismatchError
from drivetrain.runtime.mesh import Axis, HostLevels, Mesh, neighbors_of
from drivetrain.runtime.world import World
from drivetrain.shards import Reader, Shard

# --- the communicator of an axis over hosts whose channels between hosts are approximate ---


class LinkedCommunicator(HierarchicalCommunicator):
    """Levels of hosts whose channels between hosts are as the methods of the run say.

    Args:
        axis: the mesh axis.
        levels: its ranks on this host, perhaps this one alone, and those at its place of each host.
        traffic: the ledger.
        world: the device of this rank, and how long one message may take.
        links: the methods.

    Attributes:
        channels: those of gradients that are approximate.
    """

    def __init__(
        self,
        axis: Axis,
        levels: HostLevels,
        traffic: Traffic,
        world: World,
        links: LinkMethods,
    ) -> None:
        super().__init__(axis, levels, connecting(traffic, world), traffic, world.timeout)
        for method in (links.gradients, links.parameters):
            if method is not None:
                method.get_ready(world.device)
        self._follow(links)
        self._host_levels = levels
        self._device = world.device
        self.channels: list[LinkChannel] = []
        self._awaiting: dict[LinkChannel, Callable[[], None]] = {}
        self._parked = ParkedState()
        # Names of parameters whose gradients all ranks of the host sum, and of those whose errors
        # lie on the ranks of the host that had them before.
        self._summed: set[str] = set()
        self._apart: set[str] = set()

    @override
    def gradients_summed(
        self, flat_slice: FlatSlice, label: str, replaces: SumChannel | None = None
    ) -> SumChannel:
        exact = super().gradients_summed(flat_slice, label)
        near, far = self._collecting, self._far

        def start(reduction: FarReduction, tensor: Tensor) -> Handle:
            flat = tensor.detach().view(-1)
            shares = [[flat[start:stop]] for start, stop in near.chunk(flat.numel())]
            collected = near.reduce_parts(shares, label=label)
            mine = shares[near.rank][0]
            summands = [[mine[start:stop]] for start, stop in far.chunk(mine.numel())]
            summed = reduction.start(summands, first=collected.wait, label=label)
            spread = self._spreading.gather_parts(shares, label=label, first=summed.wait)
            return StagedHandle([collected, summed, spread], ())

        return self._channel(
            exact,
            start,
            lambda: far_pieces(flat_slice, self._host_levels),
            replaces,
            whole=flat_slice,
        )

    @override
    def renew_channels(self) -> None:
        for channel in self.channels:
            self._parked.park(channel)
        self.channels.clear()
        self._awaiting.clear()
        self._apart |= self._summed
        self._summed.clear()

    @override
    def gradients_scattered(
        self,
        describe: Callable[[], SlicesByRank],
        label: str,
        replaces: ReduceChannel | None = None,
    ) -> ReduceChannel:
        exact = super().gradients_scattered(describe, label)
        near = self._collecting

        def start(reduction: FarReduction, parts: Parts) -> Handle:
            near_parts, far_parts = self._in_levels(parts)
            collected = near.reduce_parts(near_parts, label=label)
            summed = reduction.start(far_parts, first=collected.wait, label=label)
            return StagedHandle([collected, summed], ())

        return self._channel(
            exact,
            start,
            lambda: describe()[near.rank :: near.size],
            replaces,
        )

    def _channel(
        self,
        exact: Callable[..., Handle],
        start: Callable[..., Handle],
        describe: Callable[[], SlicesByRank],
        replaces: Callable[..., Handle] | None,
        *,
        whole: FlatSlice | None = None,
    ) -> LinkChannel:
        """Return a channel of gradients as the methods say, which takes over what others kept.

        Args:
            exact: the channel without a method.
            start: starts the sum by a reduction between hosts.
            describe: returns the tensors between hosts.
            replaces: the channel that is given up.
            whole: the tensor that all ranks of the host sum.
        """
        if isinstance(replaces, LinkChannel):
            self._awaiting.pop(replaces, None)
            if replaces in self.channels:
                self.channels.remove(replaces)
                self._parked.park(replaces)
        made = LinkChannel(exact, self._links.warmup, undoable=self._links.undoable)

        def take_method() -> None:
            links, parked, pieces = self._links, self._parked, describe()
            spans = [span for part in pieces for flat_slice in part for span in flat_slice.spans]
            summed = () if whole is None else whole.spans
            apart = [span for span in summed if span.name in self._apart]
            for span in apart:  # another rank of this host may get an element
                parked.share(span, self._collecting, self._device)
            method, held = links.gradients, links.approximated("gradients", pieces)
            if method is not None and method.approximates(held):
                reduction = method.reduction(self._far, held, everywhere=whole is not None)
                parked.give(reduction)
                made.take_method(reduction, spans, partial(start, reduction))
                made.resume(parked.sums([span.name for span in spans]))
                self.channels.append(made)
            for span in apart:
                parked.drop(span.name)
            self._summed |= {span.name for span in summed}
            self._apart -= self._summed

        if self._links.is_open("gradients"):
            self._awaiting[made] = take_method
        else:
            take_method()
        return made

    def _follow(self, links: LinkMethods) -> None:
        self._links = links
        self.approximates_parameters = links.approximates_parameters
        self.owns_apart = links.owns_apart

    @override
    def take_links(self, links: LinkMethods) -> None:
        self._follow(links)
        if links.is_open("gradients"):
            return
        awaiting, self._awaiting = self._awaiting, {}
        for take_method in awaiting.values():
            take_method()

    @override
    def parameters_gathered(
        self, describe: Callable[[], SlicesByRank], label: str
    ) -> GatherChannel:
        return self._gathered(describe, label, updates=False)

    @override
    def parameters_updated(self, describe: Callable[[], SlicesByRank], label: str) -> GatherChannel:
        return self._gathered(describe, label, updates=True)

    def _gathered(
        self, describe: Callable[[], SlicesByRank], label: str, *, updates: bool
    ) -> GatherChannel:
        exact = super().parameters_gathered(describe, label)
        method, near = self._links.parameters, self._collecting
        if method is None:
            return exact
        held = self._links.approximated("parameters", describe()[near.rank :: near.size])
        if not method.approximates(held):
            return exact
        gathering = method.gathering(self._far, held, updates=updates)

        def start(parts: Parts, first: First) -> Handle:
            near_parts, far_parts = self._in_levels(parts)
            ready = first or (lambda: None)
            gathered = gathering.start(far_parts, first=ready, label=label)
            spread = self._spreading.gather_parts(near_parts, label=label, first=gathered.wait)
            return StagedHandle([gathered, spread], ())

        return start

    @override
    def before_sums_without(self, names: Collection[str]) -> None:
        for channel in self.channels:
            if any(span.name in names for span in channel.spans):
                channel.copy()

    @override
    def give_back(self, names: Collection[str]) -> None:
        for channel in self.channels:
            channel.give_back(names)

    @override
    def step_decided(self, *, taken: bool) -> None:
        for channel in self.channels:
            channel.step_decided(taken=taken)

    # --- checkpoints ---

    @override
    def kept(self) -> Iterator[Shard]:
        method, counted = self._links.name_for("gradients"), bool(self._links.warmup)
        return self._parked.shards(self.channels, method, self._far.rank, counted=counted)

    @override
    def take_kept(self, reader: Reader) -> bool:
        saved = SavedLinks(reader)
        self._parked = ParkedState()
        self._apart.clear()
        for channel in self.channels:
            saved.give(channel.reduction, self._far.rank, self._far.size)
            channel.resume(saved.sums([span.name for span in channel.spans]))
        method = self._links.gradients
        return method is not None and method.keeps_feedback


def connect_linked(
    mesh: Mesh,
    name: str,
    traffic: Traffic,
    world: World,
    links: LinkMethods,
) -> Communicator:
    """Return a communicator over an axis of the mesh, with channels as the links say.

    Collective: every rank must call it in the same order.

    Args:
        mesh: the started axes.
        name: of the axis.
        traffic: the ledger; gets what is sent between hosts under the name ``NAME.far``.
        world: the hosts of all ranks, and the device of this one.
        links: the methods.

    Raises:
        ConfigError: hosts hold different numbers of ranks of the axis, or not in a row.
    """
    count = hosts_apart(mesh, name, world, links)
    if count is None:
        return connect_over_hosts(mesh, name, traffic, world)
    near = mesh.start_neighbors(name, count, world)
    levels = HostLevels(near, mesh.start_across(name, count, world))
    return LinkedCommunicator(mesh[name], levels, traffic, world, links)


def route_linked(mesh: Mesh, name: str, world: World, links: LinkMethods) -> Route:
    """Return the route of data under ``connect_linked``, to count the bytes of a rank."""
    count = hosts_apart(mesh, name, world, links)
    if count is None:
        return route_over_hosts(mesh, name, world)
    levels = HostLevels(mesh.neighbors(name, count), mesh.across(name, count))
    return Route(mesh[name], levels, links)


def hosts_apart(mesh: Mesh, name: str, world: World, links: LinkMethods) -> int | None:
    """Return how many ranks of an axis a host has; None if nothing is approximate between hosts.

    Raises:
        ConfigError: hosts hold different numbers of ranks of the axis, or not in a row.
    """
    if not links.in_levels or not mesh[name].spans_hosts:
        return None
    return mesh.per_host(name, world)


def connect_replicas(
    axis: Axis, traffic: Traffic, world: World, links: LinkMethods
) -> Communicator:
    """Return a communicator over ranks on different hosts, with channels as the links say.

    Args:
        axis: the ranks, started; replicas of each other's shards.
        traffic: the ledger.
        world: the device of this rank.
        links: the methods.

    Raises:
        ConfigError: several of the ranks share a host.
    """
    levels = levels_of_replicas(axis, links)
    if levels is None:
        return connecting(traffic, world)(axis)
    return LinkedCommunicator(axis, levels, traffic, world, links)


def route_of_replicas(axis: Axis, links: LinkMethods) -> Route:
    """Return the route of data under ``connect_replicas``, to count the bytes of a rank."""
    levels = levels_of_replicas(axis, links)
    return Route(axis) if levels is None else Route(axis, levels, links)


def levels_of_replicas(axis: Axis, links: LinkMethods) -> HostLevels | None:
    """Return an axis over hosts as its far level; None if nothing is approximate on it.

    Raises:
        ConfigError: several of the ranks share a host.
    """
    if not links.in_levels or not axis.spans_hosts:
        return None
    if len(set(axis.hosts)) < axis.size:
        raise ConfigError(
            f"expected with links.far one rank of {axis.name!r} per host, found hosts "
            f"{', '.join(axis.hosts)}; let groups of shards be as large as hosts (shard_size), "
            "or leave links.far out"
        )
    return HostLevels(axis.alone, axis)


# --- the islands of a run ---

KEY = "links.hardware"


def agreed_islands(world: World, hardware: str) -> World:
    """Return the world with the islands that a description declares. Collective.

    Args:
        world: all ranks.
        hardware: name of the description, or a file; "" leaves the hosts as islands.

    Raises:
        ConfigError: the description cannot be read, or does not fit the ranks; on every rank.
        RankMismatchError: ranks have read different sizes; on every rank.
    """
    if not hardware or world.size == 1:
        return world
    devices, problem = 0, ""
    try:
        devices = _devices_of_a_host(hardware)
    except DrivetrainError as error:  # the other ranks wait for an answer
        problem = str(error)
    mine = devices, problem
    every = gather_facts(mine, tuple[int, str], doing=f"the sizes of islands in {KEY}")
    for rank, (theirs, problem) in enumerate(every):
        if problem:
            raise ConfigError(f"{KEY}: rank {rank}: {problem}")
        if theirs != every[0][0]:
            raise RankMismatchError(
                f"{KEY}: expected the same host.devices on all ranks, found {every[0][0]} on "
                f"rank 0 and {theirs} on rank {rank}; give all hosts the same file"
            )
    return in_islands(world, devices)


def declared_islands(world: World, hardware: str) -> World:
    """Return a planned world with the islands that a description declares, without other ranks.

    Args:
        world: all ranks.
        hardware: name of the description, or a file; "" leaves the hosts as islands.

    Raises:
        ConfigError: the description cannot be read, or does not fit the ranks.
    """
    if not hardware or world.size == 1:
        return world
    return in_islands(world, _devices_of_a_host(hardware))


def _devices_of_a_host(hardware: str) -> int:
    from drivetrain.hardware.description import load_hardware  # slow to load

    return load_hardware(hardware).host.devices


def in_islands(world: World, size: int) -> World:
    """Return the world with islands of so many consecutive ranks.

    Raises:
        ConfigError: the ranks cannot be cut into such islands, or an island has a part of a host
            and ranks of another host.
    """
    if world.size % size:
        raise ConfigError(
            f"{KEY}: expected a number of ranks that host.devices divides, found {world.size} "
            f"ranks and host.devices: {size}; change the number of ranks, or the description"
        )
    for island in neighbors_of([tuple(range(world.size))], size):
        hosts = {world.hosts[rank] for rank in island}
        outside = [r for r, host in enumerate(world.hosts) if host in hosts and r not in island]
        if len(hosts) > 1 and outside:
            raise ConfigError(
                f"{KEY}: expected islands that lie on one host, or hold whole hosts, found with "
                f"host.devices: {size} an island of ranks {', '.join(map(str, island))} on hosts "
                f"{', '.join(sorted(hosts))}, which have rank {outside[0]}, too; change "
                "host.devices, or the number of ranks per host"
            )
    return replace(world, declared=tuple(f"island {rank // size}" for rank in range(world.size)))
