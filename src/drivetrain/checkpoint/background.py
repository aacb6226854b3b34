"""Finishes one save at a time in a thread, while training goes on.

The threads of the ranks agree over a gloo group of their own, and never meet the collectives of
training. A thread is no daemon: a process that ends well finishes its save.
"""

import threading
from collections.abc import Callable

import torch.distributed as dist

from drivetrain.checkpoint.agreement import Group
from drivetrain.log import get_logger
from drivetrain.runtime.world import World

logger = get_logger(__name__)


class Background:
    """The save that is being finished in the background, of all ranks together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group: Group = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, finish: Callable[[Group], None]) -> None:
        """Run the rest of a save in a thread. Collective: the first call makes the group."""
        self.wait()
        if self._group is None and self._world.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._world.timeout)
        self._thread = threading.Thread(
            target=self._run, args=(finish,), name="drivetrain-checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when the save is complete; at once when there is none.

        Raises:
            CheckpointError: the save failed; on every rank, and only once.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait, and let go of the group; a later save makes another one."""
        try:
            self.wait()
        finally:
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _run(self, finish: Callable[[Group], None]) -> None:
        try:
            finish(self._group)
        except Exception as error:  # raised by the next wait(); a script may never come to one
            logger.error("a save in the background failed: %s", error)
            self._failure = error
