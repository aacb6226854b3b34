"""Python's garbage collections, after the same steps on all ranks.

By itself each rank collects when it has made enough objects: at moments that differ between ranks,
and at each of them all other ranks wait (Jiang et al., "MegaScale", NSDI 2024).
"""

import gc


class SharedCollections:
    """Collects garbage after the same steps on all ranks, and keeps Python from it in between.

    Args:
        every: steps from one collection to the next; 0 leaves Python alone.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._began = self._was_enabled = False
        self._last = 0

    def after_step(self, step: int) -> None:
        """Collect after the first step, and after each so many steps.

        Args:
            step: number of the optimizer step, from 1.
        """
        if not self._every:
            return
        if not self._began:
            self._began, self._was_enabled = True, gc.isenabled()
            gc.disable()
            gc.collect()
        elif step // self._every != self._last // self._every:
            gc.collect()
        self._last = step

    def release(self) -> None:
        """Let Python collect by itself again, if it did before."""
        if self._began and self._was_enabled:
            gc.enable()
        self._began = False
