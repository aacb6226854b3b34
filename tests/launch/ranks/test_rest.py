"""Ranks that stand still while nobody waits, from states of ranks that were made up."""

from drivetrain.runtime.board import DRAWING, NATIVE
from drivetrain_launch.ranks import watch as diagnosis
from drivetrain_launch.ranks.watch import Usual, resting
from waiting_ranks import operation, view


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
