"""The values of a unit that few neighbors hold together: until backward, or for good.

A part until backward is a copy of whole values. A part for good is the secondary partition of
Wang et al., "ZeRO++", 2023 (arXiv 2306.10209, section 4.2), which keeps every gather inside of a
host. In the paper, and with parts until backward, the gather for forward still crosses hosts and
writes the parts. Parts for good are brought up to date by the ranks that step the parameters::

    step       rank at place j of each host    sends its new values to the ranks at place j  (far)
    gathers    ranks of a host                 exchange their parts                          (near)
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.collectives import Communicator, Handle, Route, connect
from drivetrain.collectives.communicator import Finished, GatherChannel
from drivetrain.collectives.stretch import StretchParts
from drivetrain.links.linked import connect_replicas, route_of_replicas
from drivetrain.log import get_logger
from drivetrain.runtime.mesh import Axis
from drivetrain.sharding.layout import stretches_of
from drivetrain.sharding.options import UnitsOptions
from drivetrain.sharding.shard import FlatTensor
from drivetrain.store import Pending
from drivetrain.strategy import Run

logger = get_logger(__name__)


class NearPart:
    """One rank's part of a unit's values that its neighbors hold together.

    Args:
        values: the flat tensors, each 1-D; this rank's part of each is copied.
        neighbors: the ranks that hold a part each.
    """

    def __init__(self, values: Sequence[Tensor], neighbors: Communicator) -> None:
        self._neighbors = neighbors
        self._parts = [
            [flat[slice(*neighbors.chunk(flat.numel())[rank])] for flat in values]
            for rank in range(neighbors.size)
        ]
        self._kept = [part.clone() for part in self._parts[neighbors.rank]]

    def restore(self, label: str) -> Handle:
        """Start to bring all values back into the flat tensors."""
        with torch.no_grad():
            torch._foreach_copy_(self._parts[self._neighbors.rank], self._kept)
        return self._neighbors.gather_parts(self._parts, label=label)


class SecondaryRanks(NamedTuple):
    """The ranks that keep secondary shards.

    Attributes:
        near: the ranks of this host, which hold all values together.
        far: the ranks at this rank's place of each host, which keep the same part.
    """

    near: Communicator
    far: Communicator


class SecondaryLines(NamedTuple):
    """The same ranks for a cost: nothing is started."""

    near: Axis
    far: Route


def connect_secondary(run: Run, config: UnitsOptions) -> SecondaryRanks | None:
    """Connect the ranks that keep secondary shards; None: none do, and a line says why. Collective.

    Raises:
        ConfigError: hosts hold different numbers of ranks, or not in a row.
    """
    mesh, world = run.mesh, run.world
    per_host = config.secondary_ranks(mesh, world)
    if not per_host:
        if config.keeps_secondary:
            logger.announce("secondary: host changes nothing: all ranks of 'dp' are on one host")
        return None
    near = mesh.start_neighbors("dp", per_host, world)
    far = mesh.start_across("dp", per_host, world)
    return SecondaryRanks(
        connect(near, run.traffic, world.device, world.timeout),
        connect_replicas(far, run.traffic, world, run.links),
    )


def route_secondary(run: Run, config: UnitsOptions) -> SecondaryLines | None:
    """Return the ranks of ``connect_secondary``, to count the bytes of a rank."""
    mesh = run.mesh
    per_host = config.secondary_ranks(mesh, run.world)
    if not per_host:
        return None
    across = mesh.across("dp", per_host)
    return SecondaryLines(mesh.neighbors("dp", per_host), route_of_replicas(across, run.links))


class SecondaryShard:
    """One rank's part of a unit's values that the ranks of its host hold together for good.

    The part has the values of all ranks at this rank's place of each host: the same ranges that
    a gather in levels (``drivetrain.collectives.hierarchy``) brings to this rank between hosts.
    On all of these ranks the values are equal, also where a link approximates their updates.

    Args:
        flats: the unit's flat tensors.
        near: the ranks of this host.
        far: the ranks at this rank's place of each host.
    """

    def __init__(self, flats: Sequence[FlatTensor], near: Communicator, far: Communicator) -> None:
        self._near = near
        self._far = far
        self._kept: dict[FlatTensor, list[list[Tensor]]] = {}
        self._parts: list[list[Tensor]] = [[] for _ in range(near.size)]
        self._refreshed: Handle = Finished()
        self._channels: dict[tuple[FlatTensor, ...], GatherChannel] = {}
        for flat in flats:
            for place, part in enumerate(self._parts):
                part += [piece for pieces in flat.parts[place :: near.size] for piece in pieces]
            mine = flat.parts[near.rank :: near.size]
            self._kept[flat] = [[torch.empty_like(piece) for piece in pieces] for pieces in mine]

    @property
    def kept(self) -> list[Tensor]:
        """The tensors of this part, in the order of their places among the values."""
        return [piece for hosts in self._kept.values() for pieces in hosts for piece in pieces]

    def refresh(self, after: Sequence[Pending], label: str, *, exact: bool = False) -> None:
        """Start to send this rank's shards to the other hosts, and to receive those of their ranks.

        Args:
            after: steps of this rank's shards that are under way.
            label: names the values in errors.
            exact: whether all values cross as they are, those too that no optimizer changes, and
                whatever the run's method.
        """
        moving = tuple(flat for flat in self._kept if exact or flat.moves)
        if not moving:
            return
        self.wait()
        hosts = range(self._far.size)
        parts = [[piece for flat in moving for piece in self._kept[flat][host]] for host in hosts]
        fill = partial(self._fill_own, moving, tuple(after))
        if exact or not self._far.approximates_parameters:
            self._refreshed = self._far.gather_parts(parts, label=label, first=fill)
        else:
            self._refreshed = self._channel(moving, label)(parts, fill)

    def restore(self, label: str) -> Handle:
        """Start to bring all values into the flat tensors, once this part is up to date."""
        return self._near.gather_parts(self._parts, label=label, first=self._copy_out)

    def take(self) -> None:
        """Follow values that a script has changed, alike on all ranks."""
        self.wait()
        torch._foreach_copy_(self.kept, self._parts[self._near.rank])

    def wait(self) -> None:
        """Return when this part is up to date.

        Raises:
            CollectiveError: another rank failed, or the connection to it.
        """
        self._refreshed.wait()

    def _copy_out(self) -> None:
        self.wait()
        with torch.no_grad():
            torch._foreach_copy_(self._parts[self._near.rank], self.kept)

    def _fill_own(self, moving: Sequence[FlatTensor], after: Sequence[Pending]) -> None:
        for update in after:
            update.wait()
        for flat in moving:
            flat.shard.fill(self._kept[flat][self._far.rank])

    def _channel(self, moving: tuple[FlatTensor, ...], label: str) -> GatherChannel:
        """Return the channel of updates of some flat tensors: frozen ones may begin to train."""
        if moving not in self._channels:
            layouts = [flat.layout for flat in moving]

            def describe() -> StretchParts:
                dtypes = [layout.dtype for layout in layouts]
                return stretches_of(layouts, dtypes)[self._near.rank :: self._near.size]

            self._channels[moving] = self._far.parameters_updated(describe, label)
        return self._channels[moving]
