"""One communication thread: runs submitted tasks strictly in order and keeps their outcome."""

import atexit
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from drivetrain.errors import CollectiveError
from drivetrain.runtime.words import CountingThread

EXIT_WAIT_S = 3.0
"""An ending process waits so long for operations under way, because other ranks need their results.
Without an error these are the operations of the last step."""

LONG_WAIT_S = 0.5
"""A wait for an operation is watched from this time on, and each time it has passed again."""


class Watch(Protocol):
    """Looks around while an operation takes long, and lets the operation fail if it is in vain."""

    def look(self, waited: float) -> object:
        """Look around, after so many seconds."""

    def over(self) -> None:
        """Stop: the operation has ended."""


class CollectiveTask:
    """One submitted operation, and the handle for waiting on it.

    Args:
        run: does the work, on the communication thread.
        describe: turns an exception into the error that the submitter sees.
        watch: makes a watch over a wait that takes long; None where a rank may wait for long.
        waited: is told the seconds of each wait for an unfinished task.
        waiting: makes a context for such a wait.
        facts: describes the operation to other ranks.
    """

    __slots__ = (
        "_describe",
        "_error",
        "_finished",
        "_inference",
        "_run",
        "_waited",
        "_waiting",
        "_watch",
        "facts",
    )

    def __init__(
        self,
        run: Callable[[], None],
        describe: Callable[[BaseException], CollectiveError],
        watch: Callable[[], Watch] | None = None,
        waited: Callable[[float], None] | None = None,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        facts: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.facts = facts
        self._watch = watch
        self._waited = waited
        self._waiting = waiting
        self._run: Callable[[], None] | None = run
        self._describe = describe
        # Tensors made in inference mode can be written to in inference mode alone, a thread's own.
        self._inference = torch.is_inference_mode_enabled()
        self._error: CollectiveError | None = None
        # A lock is the cheapest thing one thread can wait on for another.
        self._finished = threading.Lock()
        self._finished.acquire()

    def wait(self) -> None:
        """Return when the task has run.

        Raises:
            CollectiveError: it failed, or an earlier one did.
        """
        if not self._finished.acquire(blocking=False):
            start = time.perf_counter()
            with self._waiting():
                if self._watch is None:
                    self._finished.acquire()
                elif not self._finished.acquire(timeout=LONG_WAIT_S):
                    self._wait_long(self._watch())
            # A level that waits for the level before it keeps nobody from computing.
            in_background = isinstance(threading.current_thread(), CountingThread)
            if self._waited is not None and not in_background:
                self._waited(time.perf_counter() - start)
        self._finished.release()
        if self._error is not None:
            raise self._error

    def _wait_long(self, watch: Watch) -> None:
        """Wait on, and look around from time to time: other ranks may never come."""
        start = time.monotonic() - LONG_WAIT_S
        watch.look(LONG_WAIT_S)
        while not self._finished.acquire(timeout=LONG_WAIT_S):
            watch.look(time.monotonic() - start)
        if self._error is None:
            watch.over()

    def done(self) -> bool:
        """Whether the task has run or failed."""
        return not self._finished.locked()

    def execute(self, broken: CollectiveError | None) -> CollectiveError | None:
        """Run the task, unless an earlier failure broke the communicator; return the failure."""
        self._error = broken
        if broken is None and self._run is not None:
            try:
                with torch.inference_mode(self._inference):
                    self._run()
            except Exception as error:
                self._error = self._describe(error)
                self._error.__cause__ = error
        self._run = None  # lets go of the tensors
        self._finished.release()
        return self._error


class CommunicationThread:
    """A thread with a queue of tasks; the first failure fails every later task.

    Args:
        name: the thread's name, for stack dumps.
        place: name of the operations' order, the same on all ranks.
    """

    def __init__(self, name: str, place: str) -> None:
        self._tasks: SimpleQueue[CollectiveTask | None] = SimpleQueue()
        self._broken: CollectiveError | None = None
        self._closed = False
        self._thread = CountingThread(target=self._serve, name=name, daemon=True)
        self._thread.place = place
        self._thread.start()
        atexit.register(self._end)

    def submit(self, task: CollectiveTask) -> None:
        """Queue a task.

        Raises:
            CollectiveError: an earlier task failed, or the thread has ended.
        """
        if self._closed:
            raise CollectiveError(
                "this communicator was closed, so nothing can be sent any more; finish with the "
                "prepared model before free_memory()"
            )
        if self._broken is not None:
            raise CollectiveError(
                f"this communicator is broken by an earlier failure: {self._broken}"
            ) from self._broken
        self._thread.submitted += 1
        self._tasks.put(task)

    @property
    def place(self) -> str:
        """Name of the operations' order, the same on all ranks."""
        return self._thread.place

    def close(self) -> None:
        """Run queued operations, then end the thread; may be called more than once."""
        atexit.unregister(self._end)
        self._closed = True
        self._tasks.put(None)
        self._thread.join()

    def _end(self) -> None:
        """Let queued tasks finish before the interpreter ends, unless other ranks do not answer."""
        self._tasks.put(None)
        self._thread.join(EXIT_WAIT_S)

    @torch.no_grad()
    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._thread.current = task.facts
            self._broken = task.execute(self._broken)
            self._thread.current = None
            del task  # a finished task must not keep its tensors alive until the next one comes
