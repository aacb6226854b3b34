"""Tests side by side: ``pytest -n 2`` runs two at a time, but a test marked ``alone`` by itself.

Many tests wait for processes to start, so two at a time keep a small machine busy. A test that
measures time, or gives something a few seconds, is marked ``alone``: it has the machine to itself.

Workers of pytest-xdist agree by two locks of files. Whoever wants to start passes the gate; a test
that is alone waits at the gate until the others have ended, and nobody starts meanwhile::

    gate     held for a moment by each test that starts, and by a waiting test that is alone
    machine  shared by running tests, or held by a test that is alone
"""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Run a test beside others, or alone; the time of waiting is not the test's."""
    worker = getattr(item.config, "workerinput", None)
    if worker is None:
        return (yield)
    folder = Path(tempfile.gettempdir()) / f"drivetrain-tests-{worker['testrunuid']}"
    folder.mkdir(exist_ok=True)
    alone = item.get_closest_marker("alone") is not None
    with started(folder, alone=alone):
        return (yield)


@contextmanager
def started(folder: Path, *, alone: bool) -> Iterator[None]:
    """Context in which a test may run: beside others, or alone."""
    with (folder / "machine").open("w") as machine:
        with (folder / "gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(machine, fcntl.LOCK_UN)  # also where a child still has the file
