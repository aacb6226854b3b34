"""Checkpoints in the memory of hosts: a lost rank or host costs seconds, not a read of storage.

The files and the manifest are those of ``drivetrain.checkpoint``. In memory they are spread: each
host has the files of its own ranks, those of the host before it, and the small common ones. The
order follows Gemini (SOSP 2023), with one copy: groups of two in a ring. A save is everywhere, or
nowhere::

    all ranks   shards to the own host | copies to the next host |              |        | commit
    rank 0                             |                         | common files | spread |
    each bar is a verdict that all ranks hear: if one fails, all raise and the drafts are removed

A host's folder gets its name last, after all files of all hosts. A kill between two hosts' commits
leaves a checkpoint that some hosts do not have; the copies may make it whole even so.

After a restart each host announces the checkpoints in its memory, and which of their files it has.
A checkpoint is whole when each of its files is on some host. Before one is read, every file is
hashed, and every host gets the files that it lacks, from the hosts that have them: so any number of
ranks reads it as it reads one in storage. That needs room for the whole checkpoint on each host.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.checkpoint import commit
from drivetrain.checkpoint.commit import (
    SHOWN,
    Group,
    collect,
    explain,
    gather,
    next_name,
    saved_steps,
    share,
    together,
)
from drivetrain.checkpoint.encoding import Contents, Report, write_common
from drivetrain.checkpoint.loading import CheckpointReader, open_checkpoint
from drivetrain.checkpoint.manifest import FILE_NAME, FileRecord, HashedFile, Manifest, file_record
from drivetrain.checkpoint.saving import Background, CheckpointDraft
from drivetrain.collectives.facts import named
from drivetrain.errors import CheckpointError
from drivetrain.log import get_logger
from drivetrain.memory import disk_room, host_room
from drivetrain.runtime.world import World, memory_kept_mark, restarts

logger = get_logger(__name__)


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
        self.mine = next(home for home in self.all if world.rank in home.ranks)

    @property
    def is_keeper(self) -> bool:
        """Whether this rank makes and removes folders at its home."""
        return self.mine.keeper == self._world.rank

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


# --- files from rank to rank ---


CHUNK_BYTES = 16 * 2**20
"""Bytes of a file that are under way between two ranks: as many as its writer takes at once."""


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """A file that one rank sends to another.

    Attributes:
        source: the global rank that has the file.
        destination: the global rank that writes it.
        name: of the file, in the folders of both.
        record: its size and digest.
    """

    source: int
    destination: int
    name: str
    record: FileRecord


def exchange(transfers: Sequence[FileTransfer], rank: int, folder: Path, group: Group) -> None:
    """Send and receive the files of this rank. Collective: all ranks give the same transfers.

    After a failure of a file this rank goes on sending and receiving, for the sake of the others.

    Args:
        transfers: of all ranks; those between the same two ranks go in this order.
        rank: this one.
        folder: where this rank has its files, and where it writes the others'; each name is new.
        group: of all ranks, with gloo; None where there are no transfers.

    Raises:
        CheckpointError: a file of this rank cannot be read, or arrived damaged.
        CollectiveError: a rank is gone.
        OSError: a file cannot be written.
    """
    if not transfers:
        return
    pairs: defaultdict[tuple[int, int], list[FileTransfer]] = defaultdict(list)
    for transfer in transfers:
        pairs[transfer.source, transfer.destination].append(transfer)
    failures: list[Exception] = []
    lanes: list[Iterator[Any]] = []
    for (source, destination), files in pairs.items():
        if source == rank:
            lanes.append(_send(files, folder, group, failures))
        if destination == rank:
            lanes.append(_receive(files, folder, group, failures))
    with named("send the files of a checkpoint", group):
        # One chunk of each pair at a time: the pair that is furthest behind can always go on.
        while lanes:
            begun = [(lane, work) for lane in lanes if (work := next(lane, None)) is not None]
            for _, work in begun:
                work.wait()
            lanes = [lane for lane, _ in begun]
    if failures:
        raise failures[0]


def _send(
    files: Sequence[FileTransfer], folder: Path, group: Group, failures: list[Exception]
) -> Iterator[Any]:
    """Yield the handle of each chunk that is being sent."""
    for transfer in files:
        for chunk in _chunks(folder / transfer.name, transfer.record.size, failures):
            yield dist.isend(chunk, transfer.destination, group=group)


def _chunks(path: Path, size: int, failures: list[Exception]) -> Iterator[Tensor]:
    """Yield a file in chunks; zeros in the place of a file that cannot be read."""
    content = torch.zeros(1, dtype=torch.uint8).expand(size)
    try:
        found = path.stat().st_size
        if found != size:
            raise CheckpointError(f"expected {size} bytes in {path}, found {found}")
        if size:  # mapped: its bytes are not read yet
            content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError, CheckpointError) as error:
        failures.append(error)
    for chunk in torch.split(content, CHUNK_BYTES) if size else ():
        yield chunk.contiguous()


def _receive(
    files: Sequence[FileTransfer], folder: Path, group: Group, failures: list[Exception]
) -> Iterator[Any]:
    """Yield the handle of each chunk that is being received; then write that chunk."""
    memory = bytearray(min(CHUNK_BYTES, max(transfer.record.size for transfer in files)))
    for transfer in files:
        arrival = ArrivingFile(folder / transfer.name, transfer.record, failures)
        left = transfer.record.size
        while left:
            chunk = memoryview(memory)[: min(left, CHUNK_BYTES)]
            yield dist.irecv(
                torch.frombuffer(chunk, dtype=torch.uint8), transfer.source, group=group
            )
            arrival.add(chunk)
            left -= len(chunk)
        arrival.end()


class ArrivingFile:
    """A file that is written chunk by chunk; after a failure, which is noted, no more is written.

    Args:
        path: the file, which does not exist.
        record: its size and digest at the sender.
        failures: the list for a failure.
    """

    def __init__(self, path: Path, record: FileRecord, failures: list[Exception]) -> None:
        self._record, self._failures = record, failures
        self._file: HashedFile | None = None
        try:
            self._file = HashedFile(path)
        except OSError as error:
            failures.append(error)

    def add(self, chunk: memoryview) -> None:
        """Append a chunk."""
        if self._file is not None:
            try:
                self._file.write(chunk)
            except OSError as error:
                self._failures.append(error)
                self._file.__exit__(type(error))
                self._file = None

    def end(self) -> None:
        """Close the file, and compare it with the sender's.

        The record of a file that could not be read there differs, too.
        """
        if self._file is None:
            return
        found, path = self._file.record, self._file.path
        self._file.__exit__(None)
        if found != self._record:
            self._failures.append(
                CheckpointError(
                    f"expected sha256 {self._record.sha256} of {path} after its way from another "
                    f"host, found {found.sha256}; save again"
                )
            )


# --- writes one ---


KEPT = 2
"""Checkpoints in memory at one time: the newest whole one, and the one that is being written."""


class MemorySave(CheckpointDraft):
    """One save in memory; its draft is a folder of each home.

    Args:
        number: of the checkpoint, alike on all ranks.
        homes: of all ranks.
        world: all ranks.
    """

    def __init__(self, number: int, homes: MemoryHomes, world: World) -> None:
        self._homes = homes
        name = f"checkpoint_{number}"
        target = homes.mine.folder / name
        super().__init__(target, f"{name} in memory", world, is_keeper=homes.is_keeper)

    def stage(self, contents: Contents, copy: Callable[[Tensor], Tensor]) -> Contents:
        """Return a copy as ``CheckpointDraft.stage`` does, if each host has room for the files.

        Raises:
            CheckpointError: on every rank.
        """
        staged = super().stage(contents, copy)
        with self.abandoned_on_failure():
            self._check_room(staged.shard_bytes + self._writer.needed)
        return staged

    def finish(self, contents: Contents, group: Group = None) -> bool:
        """Write the contents, and return whether they are kept. Collective over the group.

        Weights that are not finite are no state to go back to, and are not kept.

        Raises:
            CheckpointError: on every rank, when it failed on any; nothing of it is left.
        """
        world, doing = self._world, self._doing
        with self.abandoned_on_failure():
            report = together(world, doing, partial(self._writer.write, contents), group)
            finite = gather(world, report.finite, bool, group, doing=doing)
            if not all(finite):
                self._abandon()
                return False
            files = gather(world, report.files, dict[str, FileRecord], group, doing=doing)
            together(world, doing, partial(self._copy, files, group), group)
            reports = collect(world, report, Report, group)
            write = partial(write_common, self.draft, reports, contents)
            written = together(world, doing, lambda: write() if world.is_main else {}, group)
            common = share(world, written, dict[str, FileRecord], group)
            together(world, doing, partial(self._spread, common, group), group)
            try:
                together(world, doing, partial(self._on_keeper, self._commit), group)
            except CheckpointError:
                self._on_keeper(partial(commit.delete, self.target))
                raise
        return True

    def _begin(self) -> None:
        """Make room: of older checkpoints the newest stays."""
        folder = self._homes.mine.folder
        commit.sweep(folder)
        for old in commit.complete(folder)[KEPT - 1 :]:
            commit.retire(old, self._token)
        self.draft.mkdir(mode=0o700)

    def _check_room(self, mine: int) -> None:
        """Compare the free memory of each host with the size of the files to come."""
        here = mine, len(commit.complete(self.target.parent))
        told = gather(self._world, here, tuple[int, int])
        incoming = [0] * self._world.size
        for rank, (size, _) in enumerate(told):
            if (to := self._homes.neighbor(rank)) is not None:
                incoming[to] += size
        ranks = self._homes.mine.ranks
        once = sum(told[rank][0] + incoming[rank] for rank in ranks)
        needed = once * (KEPT - told[self._homes.mine.keeper][1])
        together(self._world, self._doing, partial(self._on_keeper, partial(self._fits, needed)))

    def _fits(self, needed: int) -> None:
        found, home = self._homes.room(), self._homes.mine
        if needed > found:
            raise CheckpointError(
                f"expected {needed} bytes of free memory under {home.folder.parent} of "
                f"{home.name}, for {KEPT} checkpoints in memory, found {found}; give the host more "
                "of it (mount -o remount,size=..., or --shm-size of a container), divide the state "
                "over more hosts, or set checkpoint.local to none"
            )

    def _copy(self, files: Sequence[Mapping[str, FileRecord]], group: Group) -> None:
        """Send the files of each rank to its neighbor."""
        transfers = [
            FileTransfer(rank, to, name, record)
            for rank, own in enumerate(files)
            if (to := self._homes.neighbor(rank)) is not None
            for name, record in own.items()
        ]
        exchange(transfers, self._world.rank, self.draft, group)

    def _spread(self, common: Mapping[str, FileRecord], group: Group) -> None:
        """Send the common files of rank 0, the manifest last, to each home."""
        transfers = [
            FileTransfer(0, home.keeper, name, record)
            for home in self._homes.all
            if 0 not in home.ranks
            for name, record in common.items()
        ]
        exchange(transfers, self._world.rank, self.draft, group)


# --- finds what is left, and brings it together ---


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
            files[FILE_NAME] = file_record(directory / FILE_NAME)
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
    # hosts that were away may have another checkpoint of the same name: its manifest tells
    kept = [
        {(one.name, one.files[FILE_NAME].sha256): one for one in told[home.keeper]}
        for home in homes.all
    ]
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
    return sorted(
        whole, key=lambda one: (one.steps, int(one.name.rpartition("_")[2])), reverse=True
    )


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
        holders = tuple(
            held - frozenset(name for rank in home.ranks for name in told[rank])
            for held, home in zip(found.holders, homes.all, strict=True)
        )
        found = replace(found, holders=holders)
        if found.missing:
            raise CheckpointError(
                f"cannot {doing}: {', '.join(found.missing)} changed after being written, and no "
                "other host has a copy"
            )
        together(world, doing, partial(_remove, directory, damaged))
    transfers = _plan(found, homes)
    coming = FilesToCome(found, transfers, homes)

    def on_keepers(work: Callable[[], None]) -> None:
        together(world, doing, work if homes.is_keeper else lambda: None)

    on_keepers(coming.check_room)
    on_keepers(coming.prepare)
    try:
        together(world, doing, partial(exchange, transfers, world.rank, directory, group))
    except CheckpointError:
        on_keepers(coming.undo)
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
    """The files of a checkpoint that are to come to the home of this rank, its keeper.

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
        others = _others(self._staying, homes)
        room = homes.room() + sum(_size(path) or 0 for each in others for path in each.iterdir())
        if self._needed > room:
            raise CheckpointError(
                f"expected {self._needed} bytes of free memory under {homes.mine.folder.parent} of "
                f"{homes.mine.name} for the files of the other hosts, found {room}"
            )

    def prepare(self) -> None:
        """Make the folder, without the files that are to come, and room for these."""
        if self._needed > self._homes.room():
            keep_only(self._staying, self._homes)
        if not self._holds_part:  # a folder of this name is of another history
            commit.delete(self._directory)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        _remove(self._directory, self._names)

    def undo(self) -> None:
        """Remove the files that have come."""
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


def _damaged(directory: Path, found: SpreadCheckpoint, homes: MemoryHomes, rank: int) -> list[str]:
    """Return the damaged files among those at this home, which its ranks share."""
    home = homes.mine
    held = sorted(found.holders[homes.all.index(home)], key=lambda n: (-found.files[n].size, n))
    mine = held[home.ranks.index(rank) :: len(home.ranks)]
    return [name for name in mine if file_record(directory / name) != found.files[name]]


def _remove(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


class MemoryCheckpoints:
    """The checkpoints of one Accelerator in memory.

    Args:
        folder: its own in the memory of this host; the launcher, which outlives ranks, removes it.
        every: optimizer steps from one checkpoint to the next.
        world: all ranks.
        background: finishes the saves, over a gloo group of its own.
    """

    def __init__(self, folder: Path, every: int, world: World, background: Background) -> None:
        self._folder, self._every, self._world = folder, every, world
        self._background = background
        self._saved_at: int | None = None
        self._reserved = False
        self._number = 0
        self._failed: list[SpreadCheckpoint] = []

    def is_due(self, steps: int) -> bool:
        """Whether ``save`` is to be called after so many steps of the optimizers.

        The first step of an attempt makes buffers, and the second has a checkpoint: it tells early
        whether there is room, and after the loss of a host the state has a second copy again.
        """
        if not steps or self._saved_at is None:
            return bool(steps)
        return steps // self._every > self._saved_at // self._every

    def save(
        self,
        steps: int,
        collect: Callable[[], Contents],
        saved: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Save the contents after so many steps, in the background. Collective.

        The first call only makes the buffers of the copies. The system fills them with zeros, which
        takes longer than to copy; a thread lets it do so during the next step.

        A failure is a warning: the run goes on, and has the checkpoints before and in storage. Only
        the first save of a run must begin, since the setup of a run is wrong if it cannot.

        Args:
            steps: that optimizers have taken.
            collect: returns the contents of this rank.
            saved: called on rank 0 with the state of the checkpoint when it is complete.

        Raises:
            CheckpointError: on every rank: the first save of the run cannot begin.
        """
        is_first = self._saved_at is None and not restarts()
        try:
            if not self._reserved:
                self._reserved = True
                collected = together(self._world, "save in memory", collect)
                kinds = collected.copied_kinds()  # strategies may exchange something for it
                reserve = partial(self._background.buffers.reserve, kinds)
                together(self._world, "make buffers for checkpoints in memory", reserve)
                return
            save = self.begin(steps)
            with save.abandoned_on_failure():
                contents = together(self._world, "save in memory", collect)
            with self._background.buffers.copying() as copy:
                staged = save.stage(contents, copy)
        except CheckpointError as error:  # the same on every rank
            if is_first:
                raise
            self._warn(error)
            return
        self._background.start(partial(self._finish, save, staged, saved))

    def _finish(
        self,
        save: MemorySave,
        contents: Contents,
        saved: Callable[[Mapping[str, Any]], None],
        group: Group,
    ) -> None:
        try:
            kept = save.finish(contents, group)
        except CheckpointError as error:  # the same on every rank
            self._warn(error)
            return
        if not self._world.is_main:
            return
        if kept:
            try:
                saved(contents.state)
            except OSError as error:
                logger.warning(f"cannot tell the launcher of a checkpoint: {explain(error)}")
        else:
            logger.warning("no checkpoint in memory: the weights are infinite or NaN")

    def _warn(self, error: CheckpointError) -> None:
        logger.warning(f"{error}; the run goes on without this checkpoint in memory")

    def begin(self, steps: int) -> MemorySave:
        """Begin a save after so many steps. Collective.

        Raises:
            CheckpointError: on every rank, when it cannot be begun.
        """
        homes = self._homes
        is_first, self._saved_at = self._saved_at is None, steps
        if is_first:
            mine = int(next_name(self._folder).rpartition("_")[2])
            self._number = max(gather(self._world, mine, int, doing="number checkpoints in memory"))
            logger.announce(
                f"checkpoints in memory after each {self._every} optimizer steps; "
                f"{homes.describe()}"
            )
        number, self._number = self._number, self._number + 1  # a failed save has used its number
        return MemorySave(number, homes, self._world)

    def open_newest(self, stored: int | None, *, hashed: bool) -> CheckpointReader | None:
        """Open the newest whole checkpoint in memory, if storage has no newer one. Collective.

        Args:
            stored: steps of the newest checkpoint in storage that may be whole, -1 where none
                tells; None where there is none.
            hashed: whether all files are hashed first.

        Returns:
            None if storage is to be read, and ``clear`` to be called after that.

        Raises:
            CheckpointError: no whole checkpoint in memory can be read, and storage has none. The
                files stay, also after the end of the launcher.
        """
        homes = self._homes
        instead = f"storage has step {stored}"
        if stored is None or stored < 0:
            instead = "nothing is in storage" + (" that can be read" if stored else "")
        for found in whole_ones(homes, self._world):
            if stored is not None and found.steps < stored:
                break
            if found in self._failed:
                continue
            try:
                sent = bring_together(
                    found, homes, self._world, self._background.group(), hashed=hashed
                )
                directory = self._folder / found.name
                reader = open_checkpoint(directory, self._world, verify="size")
            except CheckpointError as error:  # the same on every rank
                logger.warning(f"{error}; looking for another checkpoint")
                self._failed.append(found)
                continue
            self._keep(found.name)
            logger.announce(
                f"going on from step {found.steps}, out of the memory of the hosts ({instead}); "
                f"{sent / 1e6:.1f} MB came from other hosts"
            )
            return reader
        if self._failed and homes.is_keeper:
            memory_kept_mark(self._folder).touch()
        if self._failed and stored is None:
            self._refuse_to_begin_anew(self._failed[0])
        return None

    def holds(self, reader: CheckpointReader) -> bool:
        """Whether an open checkpoint is one of these."""
        return reader.directory.parent == self._folder.resolve()

    def clear(self) -> None:
        """Remove all checkpoints in memory: the run goes on from storage, or begins."""
        self._keep("")
        if self._saved_at is not None:
            self._saved_at = 0  # steps are taken again, and count again

    def _keep(self, name: str) -> None:
        """Remove all but one checkpoint at this rank's home."""
        homes = self._homes
        keep_only(name, homes)
        if homes.is_keeper:
            memory_kept_mark(self._folder).unlink(missing_ok=True)

    def _refuse_to_begin_anew(self, found: SpreadCheckpoint) -> NoReturn:
        """Raise the error about a checkpoint that is whole and cannot be read."""
        homes = self._homes.all
        places = [f"{home.folder / found.name} of {home.name}" for home in homes[:SHOWN]]
        more = f" and {len(homes) - SHOWN} more hosts" if len(homes) > SHOWN else ""
        raise CheckpointError(
            f"expected a checkpoint to go on from, found {found.name} of step {found.steps} in the "
            "memory of the hosts, which cannot be read for the reason above, and none in storage; "
            f"its files stay there until this user starts another run with checkpoints in memory: "
            f"copy those of all hosts ({', '.join(places)}{more}) into a folder of that name "
            "beside the run's other checkpoints, and start again"
        )

    @cached_property
    def _homes(self) -> MemoryHomes:
        return MemoryHomes(self._folder, self._world)
