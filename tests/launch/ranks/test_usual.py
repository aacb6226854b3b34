"""The usual length of waits, from states of ranks that were made up."""

from drivetrain.runtime.board import DRAWING, NATIVE
from drivetrain_launch.ranks import watch as diagnosis
from drivetrain_launch.ranks.watch import Usual, diagnose, resting
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


# --- ranks that stand still while nobody waits, from states of ranks that were made up ---


def still(rank, seconds, *operations, **facts):
    return view(rank, *operations, still_s=seconds, **facts)


def found(*views):
    return resting({each.rank: each for each in views}, limit_s=60.0, usual_s=4.2)


def test_those_who_stand_still_are_named():
    rest = found(still(0, 70.0), still(1, 2.0), still(2, 65.0, section="optimizer"))
    assert rest.culprits == [0, 2]
    assert rest.sentence() == (
        "rank 0 on n1 has been in the forward for 70 s, and rank 2 on n1 has been in the optimizer "
        "for 65 s; no rank waits there, and before it took 4 s at most"
    )
    assert rest.to_json()["kind"] == "rest"
    saving = still(0, 70.0, stack='  File "/x/drivetrain/checkpoint/saving.py", line 7 in write')
    assert "rank 0 on n1 has been in a checkpoint for 70 s" in found(saving).sentence()
    stopped = found(still(0, 70.0, state="stopped"))
    assert "'kill -CONT 7' lets it go on" in stopped.sentence()


def test_nobody_is_named_where_ranks_wait_have_ended_or_do_not_train_yet():
    assert found(still(0, 50.0)) is None
    assert found(still(0, 70.0), still(1, 70.0, operation(seconds=70.0))) is None
    assert found(still(0, 70.0, state="ended")) is None
    assert found(still(0, 70.0, section="")) is None
    assert found(still(0, 70.0, section=DRAWING)) is None
    on_device = operation(seconds=70.0, place=f"dp/{NATIVE}")  # the host goes on
    assert found(still(0, 70.0, on_device)).culprits == [0]


def test_a_rest_is_unusual_from_five_times_the_longest_of_before():
    learned = Usual()
    assert learned.rest_limit_s == diagnosis.SHORTEST_REST_S
    for seconds in (0.1, 20.0, 0.1, 30.0):
        learned.learn({0: still(0, seconds), 1: still(1, 0.2)}, 0.0)
    assert learned.longest_rest_s == 20.0
    assert learned.rest_limit_s == diagnosis.TIMES_REST * 20.0
    learned.learn({0: still(0, 0.0)}, 0.0)
    assert learned.longest_rest_s == 30.0
    for seconds in (0.5, 0.0) * diagnosis.REMEMBERED:  # moments are not remembered
        learned.learn({0: still(0, seconds)}, 0.0)
    assert learned.longest_rest_s == 30.0
    assert diagnosis._ranks([0, 1, 2, 5]) == "ranks 0 to 2 and 5"
    assert diagnosis._ranks([3, 4]) == "ranks 3 and 4"
