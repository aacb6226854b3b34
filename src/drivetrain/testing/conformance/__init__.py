"""Conformance: the checks that every strategy must pass, ours and strangers' alike.

A plugin's author subclasses one class in a test file::

    from drivetrain.testing.conformance import StrategyConformance

    class TestMine(StrategyConformance):
        strategy = "mine"                            # or {"name": "mine", "option": 3}

Every check runs on each number of ranks in ``worlds``, on the CPU over gloo, through the
Accelerator alone. If a check cannot hold for a strategy, override it by a method of the same name,
which says why in a ``pytest.skip`` or tests another promise instead.
"""

from drivetrain.testing.conformance.loops import LoopChecks, PrecisionChecks, SeveralChecks
from drivetrain.testing.conformance.suite import AccountChecks, FailureChecks, StateChecks

__all__ = ["StrategyConformance"]


class StrategyConformance(
    LoopChecks,
    PrecisionChecks,
    SeveralChecks,
    AccountChecks,
    StateChecks,
    FailureChecks,
):
    """All checks; subclass it and set ``strategy``."""
