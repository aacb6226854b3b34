"""Waits with a limit that holds on a machine that does much else; only failures last so long."""

import time
from collections.abc import Callable

PATIENCE_S = 300.0


def wait_until(reached: Callable[[], object], what: str = "reached") -> None:
    """Wait for something, which is named if it does not come."""
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end, f"not {what} after {PATIENCE_S:g} s"
        time.sleep(0.02)
