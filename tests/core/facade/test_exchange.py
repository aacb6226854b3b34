"""How often ranks exchange facts: rarely where steps are fast, or where an exchange takes long."""

import time
from itertools import pairwise

import pytest

from drivetrain.facade import exchange
from drivetrain.facade.exchange import Exchange
from drivetrain.runtime.world import World

STEP_S = 0.005


class Delayed(Exchange):
    """An exchange of one rank with itself, over a link on which words wait."""

    def __init__(self, wait_s):
        super().__init__(World(size=2))
        self.wait_s = wait_s

    def _gathered(self, mine):
        time.sleep(self.wait_s)
        return [mine]


def exchanges(one, steps, *, apart):
    """Return the numbers of the steps with an exchange."""
    found = []
    for step in range(steps):
        time.sleep(STEP_S)
        if one.is_due():
            one.tell(told=False, bad=False, apart=apart)
            found.append(step)
    return found


@pytest.fixture(autouse=True)
def _slow_steps(monkeypatch):
    monkeypatch.setattr(exchange, "PERIOD_S", STEP_S / 2)


def test_ranks_that_wait_for_each_other_anyway_exchange_in_every_slow_step():
    assert exchanges(Delayed(0.0125), 6, apart=False) == list(range(6))


def test_ranks_that_step_apart_wait_for_a_slow_link_now_and_then():
    one = Delayed(0.0125)
    found = exchanges(one, 40, apart=True)
    pauses = [b - a for a, b in pairwise(found)]
    assert pauses == sorted(pauses), "pauses grow to the limit"
    assert pauses[-1] == exchange.MOST_STEPS
    one.wait_s = 0.0  # the link is free: exchanges come back, after some quick ones
    assert len(exchanges(one, 300, apart=True)) > 2 * 300 / exchange.MOST_STEPS


def test_a_notice_waits_no_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(exchange, "LONGEST_S", 3 * STEP_S)
    found = exchanges(Delayed(0.0125), 30, apart=True)
    assert max(b - a for a, b in pairwise(found)) <= 3


def test_a_word_has_both_times_and_both_flags():
    for told, bad in ((True, False), (False, True), (True, True), (False, False)):
        word = exchange._packed(told, bad, 1.5, 0.25)
        assert (exchange._seconds(word), exchange._waited(word)) == pytest.approx((1.5, 0.25))
        assert (bool(word & exchange._TOLD), bool(word & exchange._BAD)) == (told, bad)
        assert word >> exchange._MARK_BITS == exchange._MARK
    assert exchange._seconds(exchange._packed(False, False, 1e9, 1e9)) == pytest.approx(838.9, 1e-3)
