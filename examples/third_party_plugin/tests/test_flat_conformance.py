"""The strategy passes drivetrain's own conformance tests; this file is all it takes."""

from drivetrain.testing.conformance import StrategyConformance


class TestFlat(StrategyConformance):
    """Every check, on 1 to 4 ranks."""

    strategy = "flat"
