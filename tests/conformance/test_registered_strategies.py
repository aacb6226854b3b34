"""Every strategy that this distribution provides passes every conformance check."""

from importlib.metadata import entry_points

from drivetrain.registry import STRATEGIES
from drivetrain.testing.conformance import StrategyConformance

PROVIDED = sorted(
    entry.name
    for entry in entry_points(group=STRATEGIES)
    if entry.dist is not None and entry.dist.name == "drivetrain"
)

for _name in PROVIDED:
    _class = f"Test{_name.title()}"
    globals()[_class] = type(_class, (StrategyConformance,), {"strategy": _name})


def test_there_is_something_to_test():
    assert PROVIDED
