"""An event loop in a thread: the launcher's main thread watches ranks and hears signals."""

import asyncio
import threading
from collections.abc import Coroutine
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
