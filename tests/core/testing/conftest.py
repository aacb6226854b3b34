"""Runs of pytest inside of tests: their ranks are copies of one process, and given up soon."""

import pytest

QUICK_RANKS = """
import multiprocessing

from drivetrain.testing import pool

pool.GRACE_S = 1.0
get_context = multiprocessing.get_context
multiprocessing.set_forkserver_preload(["drivetrain.testing.body", "torch._dynamo"])
multiprocessing.get_context = lambda method: get_context("forkserver")
"""


@pytest.fixture
def quick_ranks():
    """Return the text of a conftest: ranks start at once, and are given up soon."""
    return QUICK_RANKS
