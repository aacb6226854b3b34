"""Pools whose threads take tasks for as long as the process lives, also while it is ending.

Those of ``concurrent.futures`` take no new tasks once the script is over: a step under way, which
submits its parts one by one, would break off, and other ranks wait for what it makes.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_Tasks = SimpleQueue[Callable[[], None] | None]


class Pool:
    """Threads that take tasks in the order of their submission.

    They start as tasks come. The end of the process does not wait for them.

    Args:
        threads: how many at most.
        name: what their names begin with.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._tasks: _Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changes = threading.Lock()
        self._end = weakref.finalize(self, _end, self._tasks, self._threads)
        self._end.atexit = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Let a thread call a function.

        Raises:
            RuntimeError: the pool was shut down.
        """
        future: Future[T] = Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)

        with self._changes:
            if not self._end.alive:
                raise RuntimeError(f"expected threads {self._name} in use, found a closed pool")
            self._tasks.put(task)
            if len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(
                    target=_serve, args=(self._tasks,), name=name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self) -> None:
        """Let what was submitted end, and join the threads; may be called more than once."""
        with self._changes:
            self._end()
        for thread in self._threads:
            thread.join()


def _end(tasks: _Tasks, threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # a finished one must not keep its tensors alive until the next one comes


def computing_pool(threads: int, name: str) -> Pool:
    """Return a pool whose threads run torch's operations without helpers of their own.

    Args:
        threads: how many; all have started when this returns.
        name: what their names begin with.
    """
    pool = Pool(threads, name)
    everyone = threading.Barrier(threads)

    def alone() -> None:
        # A thread takes the number over from the process at its first question, even after a
        # number of its own was set: so it asks first.
        torch.get_num_threads()
        torch.set_num_threads(1)
        everyone.wait()  # else a quick thread would take the task of one that is not there yet

    # The call holds for the thread that makes it, and for threads that start later: give those
    # back what they would have had.
    before = torch.get_num_threads()
    for task in [pool.submit(alone) for _ in range(threads)]:
        task.result()
    torch.set_num_threads(before)
    return pool
