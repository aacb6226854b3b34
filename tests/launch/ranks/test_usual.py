"""The usual length of waits, from states of ranks that were made up."""

from drivetrain_launch.ranks import watch as diagnosis
from drivetrain_launch.ranks.watch import Usual, diagnose
from waiting_ranks import operation, view


def seen(rank, seconds, *, place="ring", section="forward", number=9):
    """Return a rank that has waited for so long; 0 for one that does not wait."""
    waits = operation(number, number if seconds else 0, seconds, place=place)
    return view(rank, waits, section=section)


def learn(learned, now, *views):
    """Learn from a wait that is under way, and then over."""
    learned.learn({each.rank: each for each in views}, now)
    over = [seen(each.rank, 0.0, section=each.section) for each in views]
    learned.learn({each.rank: each for each in over}, now + 0.5)


TRAINING = {0: seen(0, 0.0), 1: seen(1, 0.0)}
"""Ranks that train, and wait for nobody."""


def test_a_wait_is_unusual_from_three_times_the_longest_on():
    learned = Usual()
    assert learned.wait_limit_s(TRAINING, "ring") == diagnosis.SHORTEST_S
    learn(learned, 10.0, seen(0, 20.0), seen(1, 0.0))
    learn(learned, 40.0, seen(0, 5.0), seen(1, 0.0))
    assert learned.wait_limit_s(TRAINING, "ring") == diagnosis.TIMES_USUAL * 20.0


def test_waits_before_training_are_not_remembered():
    learned = Usual()
    learn(learned, 300.0, seen(0, 0.0, section=""), seen(1, 300.0, section=""))
    learn(learned, 350.0, seen(0, 0.0, section=""), seen(1, 40.0))  # one rank still gets ready
    assert learned.wait_limit_s(TRAINING, "ring") == diagnosis.SHORTEST_S
    starting = {0: seen(0, 0.0, section=""), 1: seen(1, 0.0)}
    assert learned.wait_limit_s(starting, "ring") == diagnosis.START_S


def test_old_waits_are_forgotten_however_few_follow():
    learned = Usual()
    learn(learned, 10.0, seen(0, 200.0), seen(1, 0.0))
    learned.learn(TRAINING, 10.0 + diagnosis.WAITS_AGE_S)
    assert learned.wait_limit_s(TRAINING, "ring") == diagnosis.TIMES_USUAL * 200.0
    learned.learn(TRAINING, 11.0 + diagnosis.WAITS_AGE_S)
    assert learned.wait_limit_s(TRAINING, "ring") == diagnosis.SHORTEST_S


def test_each_order_of_operations_has_waits_of_its_own():
    learned = Usual()
    learn(learned, 10.0, seen(0, 100.0, place="everyone"), seen(1, 0.0))
    assert learned.wait_limit_s(TRAINING, "everyone") == diagnosis.TIMES_USUAL * 100.0
    assert learned.wait_limit_s(TRAINING, "ring") == diagnosis.SHORTEST_S
    limits = {"everyone": 300.0, "ring": 8.0}.__getitem__
    for place, hangs in (("everyone", False), ("ring", True)):
        views = {0: seen(0, 30.0, place=place), 1: seen(1, 0.0, place=place, number=8)}
        assert (diagnose(views, limits) is not None) == hangs
