"""A run that is told to end saves at a step that all ranks agree on, and asks to be started again.

The notice of one rank is enough. Ranks exchange their flags, and how long a step takes, in one tiny
all-reduce that travels during the following steps: nobody waits for it, and all ranks read the same
result at the same step. From the slowest step follows how many steps pass until the next exchange.
"""

import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from drivetrain.facade.options import ProjectConfiguration
from drivetrain.log import get_logger
from drivetrain.runtime.gradient_state import ActiveLoader, GradientState
from drivetrain.runtime.notices import PREEMPTED, Notice
from drivetrain.runtime.world import World, is_launched

logger = get_logger(__name__)

PERIOD_S = 0.2
"""Flags are exchanged in every step, or in steps of less than this every so many seconds."""

MOST_STEPS = 64
"""Flags are exchanged at least every so many steps: a run of fast steps may become a slow one."""


class Preemption:
    """The end of a run after a scheduler's notice.

    Args:
        world: this process among all processes.
        state: whether a window is complete, and which loader is being read.
        save: method that saves the run under an automatic name, and returns the directory; its
            object is not kept alive.
    """

    def __init__(self, world: World, state: GradientState, save: Callable[[], str]) -> None:
        self._world = world
        self._state = state
        self._save = weakref.WeakMethod(save)  # loaders hold this object, and finalizers hold them
        self._notice = Notice()
        self._shared = world.size > 1 and is_launched()
        self._group: dist.ProcessGroup | None = None
        self._flags: torch.Tensor | None = None
        self._travelling: dist.Work | None = None
        self._left = 1
        self._steps = 0
        self._since = time.monotonic()
        self._agreed = False
        self._by_script = False
        self._trained: ActiveLoader | None = None

    @property
    def agreed(self) -> bool:
        """Whether all ranks know of a notice: the same on every rank after the same step."""
        return self._agreed if self._shared else bool(self._notice.heard)

    def asked(self) -> bool:
        """Return ``agreed`` to a script, which handles notices from now on."""
        self._by_script = True
        if self._shared or self._world.size == 1:
            self._notice.listen()
        return self.agreed

    def listen(self, project: ProjectConfiguration) -> None:
        """Hear notices that a launcher hands on, if there is somewhere to save to."""
        named = project.project_dir is not None and project.automatic_checkpoint_naming
        if named and is_launched():
            self._notice.listen()

    def after_step(self) -> None:
        """Exchange the flags of the ranks, if it is time to. Collective."""
        self._trained = self._state.active_dataloader
        if not self._shared or self._state.uneven:
            return
        self._steps += 1
        self._left -= 1
        if self._left:
            return
        self._read()
        self._send()

    def between_batches(self, loader: ActiveLoader) -> None:
        """End the run here after a notice: the loader of the training loop is asked for a batch.

        Raises:
            SystemExit: with the code of a saved run, on every rank.
        """
        complete = self._state.sync_gradients and loader is self._trained
        save = self._save()
        if self._by_script or self._state.uneven or not complete or not self.agreed or save is None:
            return
        self._by_script = True  # once
        directory = save()
        heard = f" ({self._notice.heard})" if self._notice.heard else ""
        logger.announce(
            f"preempted{heard}: saved {directory}; exit code {PREEMPTED} asks to be started again"
        )
        raise SystemExit(PREEMPTED)

    def close(self) -> None:
        """Hear notices no longer."""
        self._notice.close()
        self._trained = None

    def _read(self) -> None:
        """Take over the flags, alike on all ranks, and the number of steps until the next ones."""
        if self._travelling is None or self._flags is None:
            return
        self._travelling.wait()
        told, slowest = self._flags.tolist()
        self._agreed = self._agreed or bool(told)
        self._left = max(1, int(PERIOD_S / max(slowest, PERIOD_S / MOST_STEPS)))
        self._travelling = None

    def _send(self) -> None:
        now = time.monotonic()
        seconds = (now - self._since) / self._steps
        self._since, self._steps = now, 0
        self._left = max(1, self._left)
        self._flags = torch.tensor([float(bool(self._notice.heard)), seconds], device="cpu")
        if self._group is None:
            self._group = self._common_group()
        self._travelling = dist.all_reduce(
            self._flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def _common_group(self) -> dist.ProcessGroup | None:
        """Return a group that carries flags without a wait for an accelerator."""
        if "gloo" in self._world.backend:
            return dist.group.WORLD
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._world.timeout)
        return group
