"""All checkpoints of a run in the memory of its hosts: when one is due, and which is opened."""

from collections.abc import Callable
from pathlib import Path

from drivetrain.checkpoint.agreement import Group, gather
from drivetrain.checkpoint.commit import next_name
from drivetrain.checkpoint.loading import CheckpointReader, open_checkpoint
from drivetrain.checkpoint.local.homes import MemoryHomes
from drivetrain.checkpoint.local.restoring import bring_together, keep_only, whole_ones
from drivetrain.checkpoint.local.saving import MemorySave
from drivetrain.errors import CheckpointError
from drivetrain.log import get_logger
from drivetrain.runtime.world import World

logger = get_logger(__name__)


class MemoryCheckpoints:
    """The checkpoints of one Accelerator in memory.

    Args:
        folder: in the memory of this host, made and removed by its launcher, which outlives ranks.
        every: optimizer steps from one checkpoint to the next.
        world: all ranks.
        group: returns a gloo group of all ranks, None for one process. Collective.
    """

    def __init__(self, folder: Path, every: int, world: World, group: Callable[[], Group]) -> None:
        self._folder, self._every, self._world, self._group = folder, every, world, group
        self._homes: MemoryHomes | None = None
        self._saved_at: int | None = None
        self._number = 0

    def is_due(self, steps: int) -> bool:
        """Whether a checkpoint is due after so many steps of the optimizers.

        The first step of an attempt has one, too: it tells early whether there is room, and after
        the loss of a host the state has a second copy again.
        """
        if not steps or self._saved_at is None:
            return bool(steps)
        return steps // self._every > self._saved_at // self._every

    def begin(self, steps: int) -> MemorySave:
        """Begin a save after so many steps. Collective.

        Raises:
            CheckpointError: on every rank, when it cannot be begun.
        """
        homes = self._all_homes()
        if self._saved_at is None:
            mine = int(next_name(self._folder).rpartition("_")[2])
            self._number = max(gather(self._world, mine, int, doing="number checkpoints in memory"))
            logger.announce(
                f"checkpoints in memory after each {self._every} optimizer steps; "
                f"{homes.describe()}"
            )
        save = MemorySave(self._number, homes, self._world)
        self._saved_at, self._number = steps, self._number + 1
        return save

    def open_newest(self, stored: int | None, *, hashed: bool) -> CheckpointReader | None:
        """Open the newest whole checkpoint in memory, if storage has no newer one. Collective.

        Args:
            stored: steps of the newest checkpoint in storage; None where there is none.
            hashed: whether all files are hashed first.

        Returns:
            None if storage is to be read; what is in memory is removed then.
        """
        homes = self._all_homes()
        instead = "nothing is in storage" if stored is None else f"storage has step {stored}"
        for found in whole_ones(homes, self._world):
            if stored is not None and found.steps < stored:
                break
            try:
                sent = bring_together(found, homes, self._world, self._group(), hashed=hashed)
                directory = self._folder / found.name
                reader = open_checkpoint(directory, self._world, verify="size")
            except CheckpointError as error:  # the same on every rank
                logger.warning(f"{error}; looking for another checkpoint")
                continue
            logger.announce(
                f"going on from step {found.steps}, out of the memory of the hosts ({instead}); "
                f"{sent / 1e6:.1f} MB came from other hosts"
            )
            return reader
        keep_only("", homes)
        if stored is not None:
            logger.announce(
                f"going on from step {stored}, out of storage: the memory of the hosts has no "
                "whole checkpoint that is as new"
            )
        return None

    def _all_homes(self) -> MemoryHomes:
        if self._homes is None:
            self._homes = MemoryHomes(self._folder, self._world)
        return self._homes
