"""Which checks of the kit a row of the table takes; those it leaves out come round in shares."""

import pytest

from configurations import OF_VARIANTS


def pytest_pycollect_makeitem(collector, name, obj):
    """Leave out, before it is collected, a check that a variant takes with ``--exhaustive``."""
    row = getattr(collector.obj, "row", None)
    if row is None or not name.startswith("test"):
        return None
    by_default = row.main or name in OF_VARIANTS or collector.config.getoption("exhaustive")
    return None if by_default and name not in row.without else []


def pytest_itemcollected(item):
    """Mark what only ``--exhaustive`` takes."""
    row = getattr(item.cls, "row", None)
    if row and not row.is_default(item.originalname, item.callspec.params["world"]):
        item.add_marker(pytest.mark.exhaustive)
