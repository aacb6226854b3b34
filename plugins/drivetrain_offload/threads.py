"""Threads that take tasks until the end of the process, which waits for the tasks.

The pools of ``concurrent.futures`` take no tasks once the script is over. A step still under way,
which submits its parts in turn, would break off while other ranks wait for its results. So these
pools end later: as the finalizers of the process run, the youngest pool first.
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


class ThreadPool:
    """Threads that take tasks in the order of their submission.

    A thread starts with each of the first tasks. The process lets submitted tasks end before it
    ends: Python stops a thread that still runs then, and a thread that lets go of a tensor in that
    moment is in C++ code, which aborts the process.

    Args:
        threads: how many at most.
        name: the beginning of their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._tasks: _Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changes = threading.Lock()
        parts = (self._tasks, self._threads, self._changes)
        self._end = weakref.finalize(self, _end, weakref.ref(self), *parts)

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
        """Let submitted tasks end, and join the threads; may be called more than once."""
        self._end()
        for thread in self._threads:
            thread.join()


def _end(
    pool: "weakref.ref[ThreadPool]",
    tasks: _Tasks,
    threads: list[threading.Thread],
    changes: threading.Lock,
) -> None:
    """Let threads end after the tasks before; wait for them, unless the pool was forgotten."""
    with changes:
        for _ in threads:
            tasks.put(None)
    if pool() is not None:
        for thread in threads:
            thread.join()


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # else a finished task would keep its tensors alive until the next one comes


def computing_pool(threads: int, name: str) -> ThreadPool:
    """Return a pool whose threads run torch's operations without helper threads.

    Args:
        threads: how many; all have started when this returns.
        name: the beginning of their names.
    """
    pool = ThreadPool(threads, name)
    everyone = threading.Barrier(threads)

    def compute_alone() -> None:
        # A thread takes torch's number of threads over from the process at its first question,
        # even after set_num_threads: so it asks first, and sets then.
        torch.get_num_threads()
        torch.set_num_threads(1)
        everyone.wait()  # else a quick thread would take the task of one that is not there yet

    # set_num_threads holds for the thread that calls it, and for threads that start later: the
    # latter get back the number that they would have had.
    before = torch.get_num_threads()
    for task in [pool.submit(compute_alone) for _ in range(threads)]:
        task.result()
    torch.set_num_threads(before)
    return pool
