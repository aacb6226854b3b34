"""Which units are gathered ahead, and which stay whole for backward: those of the pass before."""

from types import SimpleNamespace

from drivetrain.parallel.gather import PrefetchOrder


class Place:
    def __init__(self, key):
        self.layout = SimpleNamespace(key=key)


def test_units_follow_as_in_the_pass_before_of_the_same_phase():
    """A tied unit is needed twice, and another one follows each time."""
    order, (tied, block, head) = PrefetchOrder(), map(Place, ("tied", "block", "head"))

    def forward():
        order.begin()
        found = [order.needed("forward", each, 2) for each in (tied, block, tied, head)]
        return found, [order.left_for_good(each) for each in (tied, block, tied, head)]

    assert forward() == ([[]] * 4, [False] * 4)
    order.end(spared=2)
    assert order.needed("backward", head, 2) == []
    assert [order.spares(each) for each in (tied, block, head)] == [True, False, True]
    expected = [[block, tied], [tied, head], [head], []]
    assert forward() == (expected, [False, False, True, True])
    order.interrupt()
    assert order.needed("forward", block, 2) == [tied, head]
    assert order.needed("forward", head, 1) == []
