"""Writes one checkpoint into the memory of all hosts: everywhere, or nowhere.

::

    all ranks   shards to the own host | copies to the next host |              |        | commit
    rank 0                             |                         | common files | spread |
    each bar is a verdict that all ranks hear: if one fails, all raise and the drafts are removed

A host's folder gets its name last, after all files of all hosts. A kill between two hosts' commits
leaves a checkpoint that some hosts do not have; the copies may make it whole even so.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from drivetrain.checkpoint import commit
from drivetrain.checkpoint.agreement import Group, collect, gather, share, together
from drivetrain.checkpoint.common_files import write_common
from drivetrain.checkpoint.contents import Contents
from drivetrain.checkpoint.local.homes import MemoryHomes
from drivetrain.checkpoint.local.transfers import FileTransfer, exchange
from drivetrain.checkpoint.report import Report
from drivetrain.checkpoint.saving import RankWriter
from drivetrain.checkpoint.tensorfile import FileRecord
from drivetrain.errors import CheckpointError
from drivetrain.runtime.world import World

KEPT = 2
"""Checkpoints in memory at one time: the newest whole one, and the one that is being written."""


class MemorySave:
    """One save, begun on construction, which is collective.

    Args:
        number: of the checkpoint, alike on all ranks.
        homes: of all ranks.
        world: all ranks.

    Attributes:
        target: the folder of this rank's home in which it ends.

    Raises:
        CheckpointError: on every rank, when a folder cannot be made.
    """

    def __init__(self, number: int, homes: MemoryHomes, world: World) -> None:
        self._homes, self._world = homes, world
        self.target = homes.mine.folder / f"checkpoint_{number}"
        self._token = share(world, secrets.token_hex(8), str)
        self._doing = f"save {self.target.name} in memory"
        self._draft = commit.draft_of(self.target, self._token)
        together(world, self._doing, partial(self._on_keeper, self._begin))
        self._writer = RankWriter(self._draft, world)

    def stage(self, contents: Contents, copy: Callable[[Tensor], Tensor]) -> Contents:
        """Return a copy of the contents, which training no longer changes; see ``Save.stage``.

        Raises:
            CheckpointError: on every rank; among others, a host has no room for the files.
        """
        with self.abandoned_on_failure():
            stage = partial(self._writer.stage, contents, copy)
            staged = together(self._world, self._doing, stage)
            self._check_room(staged.shard_bytes + self._writer.bytes)
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
            write = partial(self._write_common, reports, contents)
            written = together(world, doing, write, group)
            common = share(world, written, dict[str, FileRecord], group)
            together(world, doing, partial(self._spread, common, group), group)
            self._commit_everywhere(group)
        return True

    @contextmanager
    def abandoned_on_failure(self) -> Iterator[None]:
        """Context in which an exception deletes the drafts."""
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def _begin(self) -> None:
        """Make room: of older checkpoints the newest stays."""
        folder = self._homes.mine.folder
        commit.sweep(folder)
        for old in commit.complete(folder)[KEPT - 1 :]:
            commit.retire(old, self._token)
        self._draft.mkdir(mode=0o700)

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
        exchange(transfers, self._world.rank, self._draft, group)

    def _write_common(self, reports: list[Report], contents: Contents) -> dict[str, FileRecord]:
        return write_common(self._draft, reports, contents) if self._world.is_main else {}

    def _spread(self, common: Mapping[str, FileRecord], group: Group) -> None:
        """Send the common files of rank 0, the manifest last, to each home."""
        transfers = [
            FileTransfer(0, home.keeper, name, record)
            for home in self._homes.all
            if 0 not in home.ranks
            for name, record in common.items()
        ]
        exchange(transfers, self._world.rank, self._draft, group)

    def _commit_everywhere(self, group: Group) -> None:
        commits = partial(self._on_keeper, self._commit)
        try:
            together(self._world, self._doing, commits, group)
        except CheckpointError:
            self._on_keeper(partial(commit.delete, self.target))
            raise

    def _commit(self) -> None:
        commit.commit(self._draft, self.target, self._token, overwrite=False)

    def _abandon(self) -> None:
        self._on_keeper(lambda: commit.delete(self._draft))

    def _on_keeper(self, work: Callable[[], None]) -> None:
        if self._homes.is_keeper:
            work()
