"""How often ranks exchange facts: rarely where steps are fast, or where an exchange takes long."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from drivetrain.facade import exchange as finite
from drivetrain.facade.exchange import Exchange
from drivetrain.runtime.world import World

STEP_S = 0.6


class Delayed(Exchange):
    """An exchange of this rank and another one, over a link on which words wait.

    The other rank takes ``slower`` seconds more for a step.
    """

    def __init__(self, clock, wait_s, slower=0.0):
        super().__init__(World(size=2, backend="gloo"))
        self._group = object()
        self.clock, self.wait_s, self.slower = clock, wait_s, slower
        self.steps = 0

    def is_due(self):
        self.steps += 1
        return super().is_due()

    def _gathered(self, mine):
        late = self.slower * self.steps
        other = finite._packed(False, False, finite._seconds(mine) + self.slower, 0.0)
        self.clock.now += self.wait_s + late
        self.steps = 0
        return [mine, other]


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=0.0)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(finite, "time", made)
    return made


def exchanges(one, steps, *, apart, step_s=STEP_S):
    """Return the pauses between the steps with an exchange."""
    found = []
    for step in range(steps):
        one.clock.now += step_s
        if one.is_due():
            one.tell(told=False, bad=False, apart=apart)
            found.append(step)
    return [later - earlier for earlier, later in pairwise(found)]


def test_ranks_that_step_apart_wait_for_a_slow_link_now_and_then(clock):
    one = Delayed(clock, 0.3)
    pauses = exchanges(one, 60, apart=True)
    assert pauses == sorted(pauses), "pauses grow to the limit"
    assert pauses[-1] == int(finite.LONGEST_S / STEP_S)
    one.wait_s = 0.0
    pauses = exchanges(one, 100, apart=True)
    assert pauses[-1] == 1, "the link is free again"
    one = Delayed(clock, 300.0)  # a single long wait is soon forgotten
    exchanges(one, 1, apart=True)
    one.wait_s = 0.0
    assert exchanges(one, 60, apart=True)[-1] == 1


def test_no_exchange_is_left_out_because_another_rank_is_slower(clock):
    assert exchanges(Delayed(clock, 0.0, slower=0.1), 30, apart=True) == [1] * 29


def test_fast_steps_have_no_more_between_two_exchanges(clock):
    pauses = exchanges(Delayed(clock, 0.3), 200, apart=True, step_s=0.01)
    assert max(pauses) == finite.MOST_STEPS


def test_a_word_has_both_times_and_both_flags():
    for told, bad in ((True, False), (False, True), (True, True), (False, False)):
        word = finite._packed(told, bad, 1.5, 0.25)
        assert (finite._seconds(word), finite._waited(word)) == pytest.approx((1.5, 0.25))
        assert (bool(word & finite._TOLD), bool(word & finite._BAD)) == (told, bad)
        assert word >> finite._MARK_BITS == finite._MARK
    assert finite._seconds(finite._packed(False, False, 1e9, 1e9)) == pytest.approx(838.9, 1e-3)
