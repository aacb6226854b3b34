"""Runs of pytest inside of tests: their ranks are copies of one process that has imported torch."""

import pytest

QUICK_RANKS = """
import multiprocessing

get_context = multiprocessing.get_context
multiprocessing.set_forkserver_preload(["drivetrain.testing.body", "torch._dynamo"])
multiprocessing.get_context = lambda method: get_context("forkserver")
"""


@pytest.fixture
def quick_ranks():
    """Return the text of a conftest: new ranks after each failure start at once."""
    return QUICK_RANKS
