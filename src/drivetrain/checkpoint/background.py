"""Finishes one save at a time in a thread, while training goes on.

The threads of the ranks agree over a gloo group of their own, and never meet the collectives of
training. A thread is no daemon: a process that ends well finishes its save.
"""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.checkpoint.agreement import Group
from drivetrain.log import get_logger
from drivetrain.runtime.world import World

logger = get_logger(__name__)


class StagingBuffers:
    """Host memory for the copies of one save, which the next save uses again.

    The system fills fresh memory with zeros before it is written to, which takes twice as long as
    the copy itself.
    """

    def __init__(self) -> None:
        self._used: list[Tensor] = []
        self._free: defaultdict[tuple[torch.dtype, torch.Size], list[Tensor]] = defaultdict(list)
        self._filling: threading.Thread | None = None

    def reserve(self, kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
        """Make the buffers of the first save before it; a thread has them filled meanwhile.

        Does nothing where a save has left buffers already.

        Args:
            kinds: dtype and shape of each tensor of that save.

        Raises:
            RuntimeError: there is no memory.
        """
        if self._used:
            return
        self._used = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
        self._filling = threading.Thread(
            target=_fill, args=(list(self._used),), name="drivetrain-staging", daemon=False
        )
        self._filling.start()

    @contextmanager
    def copying(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Context for the copies of a save, in buffers of the last one, which is complete.

        Yields a function from a tensor to a copy on the CPU. Buffers that do not fit are let go of;
        all of them after an error, which may be that there is no memory.
        """
        self.wait_until_filled()
        for buffer in self._used:
            self._free[buffer.dtype, buffer.shape].append(buffer)
        self._used.clear()
        try:
            yield self._copy
        except BaseException:
            self._used.clear()
            raise
        finally:
            self._free.clear()

    def _copy(self, tensor: Tensor) -> Tensor:
        fitting = self._free[tensor.dtype, tensor.shape]
        buffer = fitting.pop() if fitting else torch.empty_like(tensor, device="cpu")
        self._used.append(buffer)
        return buffer.copy_(tensor.detach())

    def wait_until_filled(self) -> None:
        """Return when no thread writes into the buffers any more."""
        if self._filling is not None:
            self._filling.join()
            self._filling = None


def _fill(buffers: Sequence[Tensor]) -> None:
    """Write zeros into memory; Python's lock is free meanwhile, and no other thread helps."""
    for buffer in buffers:
        ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)


class Background:
    """The save that is being finished in the background, of all ranks together.

    Attributes:
        buffers: of the copies that are written.
    """

    def __init__(self, world: World) -> None:
        self.buffers = StagingBuffers()
        self._world = world
        self._group: Group = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank; others may be a little ahead or behind."""
        return self._thread is not None and self._thread.is_alive()

    def group(self) -> Group:
        """Return the gloo group of the threads, while none runs. Collective: made when needed."""
        if self._group is None and self._world.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._world.timeout)
        return self._group

    def start(self, finish: Callable[[Group], None]) -> None:
        """Run the rest of a save in a thread. Collective: the first call makes the group."""
        self.wait()
        self.group()
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
            self.buffers.wait_until_filled()
            self.buffers = StagingBuffers()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _run(self, finish: Callable[[Group], None]) -> None:
        try:
            finish(self._group)
        except Exception as error:  # raised by the next wait(); a script may never come to one
            logger.error("a save in the background failed: %s", error)
            self._failure = error
