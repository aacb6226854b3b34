"""Every strategy that this distribution provides passes every conformance check."""

from importlib.metadata import entry_points

import pytest

from drivetrain.registry import STRATEGIES
from drivetrain.testing.conformance import StrategyConformance

PROVIDED = sorted(
    entry.name
    for entry in entry_points(group=STRATEGIES)
    if entry.dist is not None and entry.dist.name == "drivetrain" and entry.name != "auto"
)
"""Every strategy that trains: auto chooses one of them."""

IN_TURN = {"megatron", "offload", "plain"}
"""Each check is taken by one of these in turn: megatron with its defaults divides nothing, plain is
data parallelism by definition, and offload trains as zero2 does, whose stores have their kit."""

for _name in PROVIDED:
    _class = f"Test{_name.title()}"
    _members = {"strategy": _name}
    if _name in IN_TURN:
        _members["pytestmark"] = [pytest.mark.variants]
    globals()[_class] = type(_class, (StrategyConformance,), _members)


def test_there_is_something_to_test():
    assert PROVIDED
