"""All checkpoints of a run in the memory of its hosts: when one is due, and which is opened."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.checkpoint.agreement import SHOWN, Group, gather, together
from drivetrain.checkpoint.background import Background
from drivetrain.checkpoint.commit import next_name
from drivetrain.checkpoint.contents import Contents
from drivetrain.checkpoint.loading import CheckpointReader, open_checkpoint
from drivetrain.checkpoint.local.homes import MemoryHomes
from drivetrain.checkpoint.local.restoring import (
    SpreadCheckpoint,
    bring_together,
    keep_only,
    whole_ones,
)
from drivetrain.checkpoint.local.saving import MemorySave
from drivetrain.errors import CheckpointError
from drivetrain.log import get_logger
from drivetrain.runtime.world import World, memory_kept_mark, restarts

logger = get_logger(__name__)


class MemoryCheckpoints:
    """The checkpoints of one Accelerator in memory.

    Args:
        folder: in the memory of this host, made and removed by its launcher, which outlives ranks.
        every: optimizer steps from one checkpoint to the next.
        world: all ranks.
        background: finishes the saves, over a gloo group of its own.
    """

    def __init__(self, folder: Path, every: int, world: World, background: Background) -> None:
        self._folder, self._every, self._world = folder, every, world
        self._background = background
        self._homes: MemoryHomes | None = None
        self._saved_at: int | None = None
        self._reserved = False
        self._number = 0

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
                self._reserve(together(self._world, "save in memory", collect))
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

    def _reserve(self, contents: Contents) -> None:
        kinds = contents.copied_kinds()  # strategies may exchange something for it
        reserve = partial(self._background.buffers.reserve, kinds)
        together(self._world, "make buffers for checkpoints in memory", reserve)

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
            saved(contents.state)
        else:
            logger.warning("no checkpoint in memory: the weights are infinite or NaN")

    def _warn(self, error: CheckpointError) -> None:
        logger.warning(f"{error}; the run goes on without this checkpoint in memory")

    def begin(self, steps: int) -> MemorySave:
        """Begin a save after so many steps. Collective.

        Raises:
            CheckpointError: on every rank, when it cannot be begun.
        """
        homes = self._all_homes()
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
            stored: steps of the newest checkpoint in storage; None where there is none.
            hashed: whether all files are hashed first.

        Returns:
            None if storage is to be read, and ``clear`` to be called after that.

        Raises:
            CheckpointError: no whole checkpoint in memory can be read, and storage has none. The
                files stay, also after the end of the launcher.
        """
        homes = self._all_homes()
        instead = "nothing is in storage" if stored is None else f"storage has step {stored}"
        failed = []
        for found in whole_ones(homes, self._world):
            if stored is not None and found.steps < stored:
                break
            try:
                sent = bring_together(
                    found, homes, self._world, self._background.group(), hashed=hashed
                )
                directory = self._folder / found.name
                reader = open_checkpoint(directory, self._world, verify="size")
            except CheckpointError as error:  # the same on every rank
                logger.warning(f"{error}; looking for another checkpoint")
                failed.append(found)
                continue
            self._keep(found.name)
            logger.announce(
                f"going on from step {found.steps}, out of the memory of the hosts ({instead}); "
                f"{sent / 1e6:.1f} MB came from other hosts"
            )
            return reader
        if failed and homes.is_keeper:
            memory_kept_mark(self._folder).touch()
        if failed and stored is None:
            self._refuse_to_begin_anew(failed[0])
        if stored is not None:
            logger.announce(
                f"going on from step {stored}, out of storage: the memory of the hosts has no "
                "whole checkpoint that is as new"
            )
        return None

    def clear(self) -> None:
        """Remove all checkpoints in memory: the run goes on from storage, or begins."""
        self._keep("")

    def _keep(self, name: str) -> None:
        """Remove all but one checkpoint at this rank's home."""
        homes = self._all_homes()
        keep_only(name, homes)
        if homes.is_keeper:
            memory_kept_mark(self._folder).unlink(missing_ok=True)

    def _refuse_to_begin_anew(self, found: SpreadCheckpoint) -> NoReturn:
        """Raise the error about a checkpoint that is whole and cannot be read."""
        homes = self._all_homes().all
        places = [f"{home.folder / found.name} of {home.name}" for home in homes[:SHOWN]]
        more = f" and {len(homes) - SHOWN} more hosts" if len(homes) > SHOWN else ""
        raise CheckpointError(
            f"expected a checkpoint to go on from, found {found.name} of step {found.steps} in the "
            "memory of the hosts, which cannot be read for the reason above, and none in storage; "
            f"its files stay there until this user starts another run with checkpoints in memory: "
            f"copy those of all hosts ({', '.join(places)}{more}) into a folder of that name "
            "beside the run's other checkpoints, and start again"
        )

    def _all_homes(self) -> MemoryHomes:
        if self._homes is None:
            self._homes = MemoryHomes(self._folder, self._world)
        return self._homes
