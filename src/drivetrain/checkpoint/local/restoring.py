"""Finds the checkpoints that hosts still have in memory, and brings one together on every host.

Each host announces the checkpoints in its memory, and which of their files it has. A checkpoint is
whole when each of its files is on some host. Before one is read, every file is hashed, and every
host gets the files that it lacks, from the hosts that have them: so any number of ranks reads it as
it reads one in storage. That needs room for the whole checkpoint on each host.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drivetrain.checkpoint import commit
from drivetrain.checkpoint.agreement import Group, gather, together
from drivetrain.checkpoint.local.homes import MemoryHomes
from drivetrain.checkpoint.local.transfers import FileTransfer, exchange
from drivetrain.checkpoint.manifest import FILE_NAME, Manifest
from drivetrain.checkpoint.resumption import saved_steps
from drivetrain.checkpoint.tensorfile import FileRecord
from drivetrain.errors import CheckpointError
from drivetrain.runtime.world import World


@dataclass(frozen=True, slots=True)
class Announcement:
    """A checkpoint in the memory of one host.

    Attributes:
        name: of its folder.
        steps: that optimizers had taken.
        files: all files of the checkpoint, on whatever host, the manifest among them.
        held: the names of those that are here.
    """

    name: str
    steps: int
    files: Mapping[str, FileRecord]
    held: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpreadCheckpoint:
    """A checkpoint in the memory of several hosts.

    Attributes:
        name: of its folder.
        steps: that optimizers had taken.
        files: all files, by name.
        holders: for each home, in order, the names of the files that it has.
    """

    name: str
    steps: int
    files: Mapping[str, FileRecord]
    holders: tuple[frozenset[str], ...]

    @property
    def missing(self) -> list[str]:
        """The files that no host has."""
        return sorted(self.files.keys() - frozenset().union(*self.holders))


def announced(folder: Path) -> list[Announcement]:
    """Return the checkpoints in the memory of this host, without unreadable ones."""
    found = []
    for directory in commit.complete(folder):
        try:
            files = dict(Manifest.read(directory).files)
            files[FILE_NAME] = _record(directory / FILE_NAME)
            steps = saved_steps(directory)
        except (CheckpointError, OSError):
            continue
        held = tuple(name for name in files if _size(directory / name) == files[name].size)
        found.append(Announcement(directory.name, steps, files, held))
    return found


def whole_ones(homes: MemoryHomes, world: World) -> list[SpreadCheckpoint]:
    """Return the checkpoints that the memory of all hosts holds whole, newest first. Collective."""
    here = announced(homes.mine.folder) if homes.is_keeper else []
    told = gather(world, here, list[Announcement], doing="announce what is in memory")
    kept = [{_identity(one): one for one in told[home.keeper]} for home in homes.all]
    known = {identity: one for each in kept for identity, one in each.items()}
    spread = [
        SpreadCheckpoint(
            one.name,
            one.steps,
            one.files,
            tuple(frozenset(each[key].held if key in each else ()) for each in kept),
        )
        for key, one in known.items()
    ]
    whole = [one for one in spread if not one.missing]
    return sorted(whole, key=lambda one: (one.steps, _number(one.name)), reverse=True)


def bring_together(
    found: SpreadCheckpoint, homes: MemoryHomes, world: World, group: Group, *, hashed: bool
) -> int:
    """Give every host all files of a checkpoint. Collective.

    Another checkpoint of a host is removed only if its room is needed, and after it is known that
    every host has room. After a failure each host has the files that it had before.

    Args:
        found: the checkpoint.
        homes: of all ranks.
        world: all ranks.
        group: a gloo group of all ranks; None for one process.
        hashed: whether all files are hashed first; False looks at their sizes only.

    Returns:
        The bytes that went from host to host.

    Raises:
        CheckpointError: on every rank: files are damaged and no other host has them, or a host has
            no room for the files that it lacks.
    """
    doing = f"load {found.name} from memory"
    directory = homes.mine.folder / found.name
    if hashed:
        damaged = together(world, doing, partial(_damaged, directory, found, homes, world.rank))
        told = gather(world, damaged, list[str], doing=doing)
        found = _without(found, homes, told)
        if found.missing:
            raise CheckpointError(
                f"cannot {doing}: {', '.join(found.missing)} changed after being written, and no "
                "other host has a copy"
            )
        together(world, doing, partial(_remove, directory, damaged))
    transfers = _plan(found, homes)
    coming = FilesToCome(found, transfers, homes)
    together(world, doing, coming.check_room)
    together(world, doing, coming.prepare)
    try:
        together(world, doing, partial(exchange, transfers, world.rank, directory, group))
    except CheckpointError:
        together(world, doing, coming.undo)
        raise
    return sum(transfer.record.size for transfer in transfers)


def keep_only(name: str, homes: MemoryHomes) -> None:
    """Remove the other checkpoints at this rank's home: they are of steps that are taken again.

    Args:
        name: of the one that stays; "" for none.
        homes: of all ranks.
    """
    if homes.is_keeper:
        commit.sweep(homes.mine.folder)
        for directory in _others(name, homes):
            commit.delete(directory)


class FilesToCome:
    """The files of a checkpoint that are to come to this rank's home; its keeper alone acts.

    Args:
        found: the checkpoint.
        transfers: of all ranks.
        homes: of all ranks.
    """

    def __init__(
        self, found: SpreadCheckpoint, transfers: Sequence[FileTransfer], homes: MemoryHomes
    ) -> None:
        home = homes.mine
        self._homes, self._directory = homes, home.folder / found.name
        here = [transfer for transfer in transfers if transfer.destination in home.ranks]
        self._names = [transfer.name for transfer in here]
        self._needed = sum(transfer.record.size for transfer in here)
        self._holds_part = bool(found.holders[homes.all.index(home)])
        self._staying = found.name if self._holds_part else ""

    def check_room(self) -> None:
        """Compare the files to come with the free memory, and the memory of other checkpoints.

        Raises:
            CheckpointError: both together are too little.
        """
        homes = self._homes
        if not homes.is_keeper:
            return
        room = homes.room() + sum(map(_bytes, _others(self._staying, homes)))
        if self._needed > room:
            raise CheckpointError(
                f"expected {self._needed} bytes of free memory under {homes.mine.folder.parent} of "
                f"{homes.mine.name} for the files of the other hosts, found {room}"
            )

    def prepare(self) -> None:
        """Make the folder, without the files that are to come, and room for these."""
        if not self._homes.is_keeper:
            return
        if self._needed > self._homes.room():
            keep_only(self._staying, self._homes)
        if not self._holds_part:  # a folder of this name is of another history
            commit.delete(self._directory)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        _remove(self._directory, self._names)

    def undo(self) -> None:
        """Remove the files that have come."""
        if not self._homes.is_keeper:
            return
        if self._holds_part:
            _remove(self._directory, self._names)
        else:
            commit.delete(self._directory)


def _plan(found: SpreadCheckpoint, homes: MemoryHomes) -> list[FileTransfer]:
    """Return which rank sends which file to which, the manifest last; ranks share the work."""
    transfers: list[FileTransfer] = []
    for index, home in enumerate(homes.all):
        lacking = sorted(
            found.files.keys() - found.holders[index], key=lambda n: (n == FILE_NAME, n)
        )
        for turn, name in enumerate(lacking):
            holders = [h for h, held in enumerate(found.holders) if name in held]
            source = homes.all[holders[turn % len(holders)]].ranks
            record = found.files[name]
            to = home.keeper if name == FILE_NAME else home.ranks[turn % len(home.ranks)]
            transfers.append(FileTransfer(source[turn % len(source)], to, name, record))
    return transfers


def _others(name: str, homes: MemoryHomes) -> list[Path]:
    """Return the checkpoints at this rank's home but for one."""
    return [each for each in commit.complete(homes.mine.folder) if each.name != name]


def _bytes(directory: Path) -> int:
    return sum(_size(path) or 0 for path in directory.iterdir())


def _damaged(directory: Path, found: SpreadCheckpoint, homes: MemoryHomes, rank: int) -> list[str]:
    """Return the damaged files among those at this home, which its ranks share."""
    home = homes.mine
    held = sorted(found.holders[homes.all.index(home)], key=lambda n: (-found.files[n].size, n))
    mine = held[home.ranks.index(rank) :: len(home.ranks)]
    return [name for name in mine if _record(directory / name) != found.files[name]]


def _without(
    found: SpreadCheckpoint, homes: MemoryHomes, damaged: Sequence[Sequence[str]]
) -> SpreadCheckpoint:
    holders = tuple(
        held - frozenset(name for rank in home.ranks for name in damaged[rank])
        for held, home in zip(found.holders, homes.all, strict=True)
    )
    return SpreadCheckpoint(found.name, found.steps, found.files, holders)


def _remove(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _identity(one: Announcement) -> tuple[str, str]:
    """Tell checkpoints of one number apart, as a host that was away may have them."""
    return one.name, one.files[FILE_NAME].sha256


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])
