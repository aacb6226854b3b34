"""The continuation of a run after an end: from which step, and with how many micro-batches.

Ranks may be more or fewer than before. Then the micro-batches of a step are shared out anew: where
4 ranks took 2 micro-batches each, 2 ranks take 4 each, and each step reads the same samples.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.checkpoint import commit
from drivetrain.checkpoint.agreement import gather
from drivetrain.checkpoint.common_files import STATE_FILE
from drivetrain.errors import CheckpointError
from drivetrain.log import get_logger
from drivetrain.runtime.world import World, launched_config, restarts, saved_mark

logger = get_logger(__name__)

BATCH_KEY, TOTAL_KEY, CONFIGURED_KEY = "batch", "micro_batches", "configured"
"""Keys in the state of a checkpoint: of all ranks' micro-batches in a step, and each rank's as the
configuration has them."""


_STEPS = "steps"
"""Key of these facts with the optimizer steps of their checkpoint."""


class Resumption:
    """The continuation of one run.

    Args:
        mode: ``launch.resume`` of the configuration.
        root: folder of the automatically named checkpoints; None without one.
        divides: whether the batches of loaders are divided over the ranks, as with
            ``split_batches``: then their number does not depend on the number of ranks.
        world: this process among all processes.
        memory: folder of the checkpoints in this host's memory; None without them.
    """

    def __init__(
        self,
        mode: str,
        root: Path | None,
        *,
        divides: bool,
        world: World,
        memory: Path | None = None,
    ) -> None:
        self._mode, self._root, self._divides, self._world = mode, root, divides, world
        self._memory = memory
        self._configured = self._replicas = 1
        self._chosen = self._total = 0
        self._warned = False
        self.loaded = False

    def accumulation(self, configured: int, replicas: int) -> int:
        """Return the micro-batches of each rank's step, so that the global batch stays. Collective.

        They follow from the newest checkpoint after a restart, and with ``launch.resume: auto``;
        not if the configured number is another one than at the time of the checkpoint.

        Args:
            configured: micro-batches per step in the configuration.
            replicas: number of ranks along the data-parallel axis.
        """
        self._configured, self._replicas = configured, 1 if self._divides else replicas
        self._chosen, self._total = configured, configured * self._replicas
        nowhere = self._root is None and self._memory is None
        if nowhere or not (self._mode == "auto" or restarts()):
            return configured
        told = gather(
            self._world, self._last_batch(), dict[str, int], doing="keep the global batch"
        )
        before = max(filter(None, told), key=lambda facts: facts[_STEPS], default={})
        if not before or before[CONFIGURED_KEY] != configured:
            return configured
        self._total = before[TOTAL_KEY]
        self._chosen = max(1, round(self._total / self._replicas))
        found = self._chosen * self._replicas
        if found != self._total:
            logger.warning(
                f"the global batch changes: {self._total} micro-batches per step before, {found} "
                f"now, since {self._replicas} data-parallel ranks cannot share {self._total} "
                "evenly; losses go on differently"
            )
        elif self._chosen != configured:
            logger.announce(
                f"the global batch stays at {found} micro-batches per step: {self._chosen} on each "
                f"of {self._replicas} data-parallel ranks, instead of {configured}"
            )
        return self._chosen

    def facts(self, accumulation: int) -> dict[str, dict[str, int]]:
        """Return the entry about the global batch for the state of a checkpoint.

        Args:
            accumulation: micro-batches per step; a script may have changed them.
        """
        kept = accumulation == self._chosen
        total = self._total if kept else accumulation * self._replicas
        return {BATCH_KEY: {TOTAL_KEY: total, CONFIGURED_KEY: self._configured}}

    @property
    def begins_anew(self) -> bool:
        """Whether checkpoints are of earlier runs, and not to be loaded; rank 0 knows."""
        return self._mode == "never" and not _is_saved()

    def before_save(self) -> None:
        """Warn of a restarted script that has loaded nothing."""
        if restarts() and not (self.loaded or self._warned):
            self._warned = True
            logger.warning(
                f"the run was started again (attempt {restarts()}), and the script has loaded no "
                "checkpoint: it began anew; call accelerator.resume() after prepare()"
            )

    def saved(self, state: Mapping[str, Any], *, memory: bool = False) -> None:
        """Tell the launcher how far a checkpoint is that rank 0 has given its name.

        Args:
            state: of the checkpoint.
            memory: whether it is in the memory of the hosts.
        """
        config = launched_config()
        if config:
            mark = saved_mark(Path(config), memory=memory)
            draft = mark.with_suffix(f"{mark.suffix}-draft")
            draft.write_text(str(_steps(state)), encoding="utf-8")
            draft.replace(mark)

    def _last_batch(self) -> dict[str, int]:
        """Return the global batch's facts of the newest checkpoint that can be read, if any.

        Each rank looks into its own host's memory, and rank 0 into storage.
        """
        stored = self._root if self._world.is_main and not self.begins_anew else None
        found = [_batch_of(root) for root in (stored, self._memory) if root is not None]
        return max(filter(None, found), key=lambda facts: facts[_STEPS], default={})


def _batch_of(root: Path) -> dict[str, int]:
    for directory in commit.complete(root):
        try:
            state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))["state"]
            facts = {key: int(state[BATCH_KEY][key]) for key in (TOTAL_KEY, CONFIGURED_KEY)}
            steps = _steps(state)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # damaged, or older than this key: load_state will tell
        if min(facts.values()) > 0:
            return facts | {_STEPS: steps}
    return {}


def saved_steps(directory: Path) -> int:
    """Return the optimizer steps in a checkpoint.

    Raises:
        CheckpointError: the file of its state cannot be read, or does not tell.
    """
    path = directory / STATE_FILE
    try:
        return _steps(json.loads(path.read_text(encoding="utf-8"))["state"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} does not tell the steps of the optimizers: {error}"
        ) from error


def _steps(state: Mapping[str, Any]) -> int:
    """Return the most steps of an optimizer; -1 for a checkpoint of a version that did not tell."""
    return int(max(state.get("steps", ()), default=state.get("iteration", -1)))


def _is_saved() -> bool:
    """Whether this run of the launcher has saved a checkpoint; it began with none."""
    config = launched_config()
    return bool(config) and saved_mark(Path(config)).exists()
