"""An event loop in a thread: the launcher's main thread watches ranks and hears signals."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

CLOSE_S = 0.01
"""How long connections have to send their last bytes and close."""


class LoopThread:
    """Runs coroutines in a thread until ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine and return its result; signals are heard in between."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Cancel the coroutines that still run, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(CLOSE_S))
        self._loop.close()


class OwnTasks:
    """Serves each connection of ``asyncio.start_server`` in a task that may be cancelled.

    Python 3.11 reports a cancelled connection as an error if the task is the stream's own.

    Args:
        serve: serves one connection to its end.
    """

    def __init__(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
    ) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, beside the others."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
