"""Runs of pytest inside of tests, whose ranks are given up soon."""

import pytest

QUICK_RANKS = """
from drivetrain.testing import pool

pool.GRACE_S = 1.0
"""


@pytest.fixture
def quick_ranks():
    """Return the text of a conftest: ranks are given up soon."""
    return QUICK_RANKS
