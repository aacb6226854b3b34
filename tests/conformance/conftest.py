"""Which checks of the kit a row of the table takes."""


def pytest_pycollect_makeitem(collector, name, obj):
    """Leave out, before it is collected, a check that a variant takes with ``--exhaustive``."""
    checks = getattr(collector.obj, "checks", None)
    left_out = checks is not None and name.startswith("test") and name not in checks
    if left_out and not collector.config.getoption("exhaustive"):
        return []
    return None
