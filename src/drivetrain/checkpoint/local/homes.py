"""Whose memory holds which checkpoints: a folder in memory for each launcher, copies on a ring."""

from dataclasses import dataclass
from pathlib import Path

from drivetrain.checkpoint.agreement import gather
from drivetrain.runtime.room import disk_room, host_room
from drivetrain.runtime.world import World


@dataclass(frozen=True, slots=True)
class MemoryHome:
    """The folder of one launcher, and its ranks.

    Attributes:
        host: as in ``World.hosts``.
        folder: on a file system in the host's memory; other hosts may have the same path.
        ranks: global ranks that reach the folder, in order.
    """

    host: str
    folder: Path
    ranks: tuple[int, ...]

    @property
    def keeper(self) -> int:
        """The rank that makes, commits and removes folders here."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """The host's name for users."""
        return self.host.partition("@")[2] or self.host


class MemoryHomes:
    """The homes of all ranks. Construction is collective.

    Args:
        folder: of this rank's launcher.
        world: all ranks.
    """

    def __init__(self, folder: Path, world: World) -> None:
        told = gather(world, str(folder), str, doing="tell where memory is kept")
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, key in enumerate(zip(world.hosts, told, strict=True)):
            ranks.setdefault(key, []).append(rank)
        self._world = world
        self.all = [
            MemoryHome(host, Path(path), tuple(found)) for (host, path), found in ranks.items()
        ]
        self.mine = self.of(world.rank)

    @property
    def is_keeper(self) -> bool:
        """Whether this rank makes and removes folders at its home."""
        return self.mine.keeper == self._world.rank

    def of(self, rank: int) -> MemoryHome:
        """Return the home of a rank."""
        return next(home for home in self.all if rank in home.ranks)

    def neighbor(self, rank: int) -> int | None:
        """Return the rank on the next host that keeps the copies of a rank; None on one host.

        Ranks of the same place among the ranks of their host belong together.
        """
        hosts = list(dict.fromkeys(self._world.hosts))
        if len(hosts) == 1:
            return None
        here = hosts.index(self._world.hosts[rank])
        mine, theirs = (
            [r for r, host in enumerate(self._world.hosts) if host == hosts[index % len(hosts)]]
            for index in (here, here + 1)
        )
        return theirs[mine.index(rank) % len(theirs)]

    def room(self) -> int:
        """Return the bytes that this rank's home can still take."""
        return min(disk_room(self.mine.folder), host_room())

    def describe(self) -> str:
        """Return one phrase about the copies."""
        if self.neighbor(0) is None:
            return "on one host, so that its loss is a return to storage"
        return "each host keeps the copies of the one before it"
