"""How launchers agree: places, whom others wait for, and restarts."""

import time

from drivetrain.config import LaunchConfig
from drivetrain_launch.ranks.coordinator import Member, late, misfit, missing, overdue
from drivetrain_launch.ranks.failure import Ending, RankEnd
from drivetrain_launch.ranks.meeting import SingleHost
from drivetrain_launch.ranks.placement import Assignment, HostJob


def member(index, ending=None):
    return Member(
        index=index, name=f"n{index}", ranks=1, channel=None, software={}, machine="", network={},
        ending=ending,
    )  # fmt: skip


def saved(seconds_ago, signal=15):
    end = RankEnd(rank=0, host="n", pid=1, code=75, time=1000.0 - seconds_ago)
    return Ending(ended=(end,), signal=signal)


def test_places_of_launchers_that_share_machines():
    place = Assignment(attempt=0, sizes=(2, 1, 1), index=2, port=1, nodes=(0, 1, 1))
    assert (place.first_rank, place.size, place.world_size) == (3, 1, 4)
    assert (place.node, place.neighbors) == (1, [1, 2])
    assert Assignment(attempt=0, sizes=(2, 2), index=1, port=1).neighbors == [1]


def test_hosts_that_others_wait_for():
    assert missing((3, 3), [0, 2]) == "1 of 3 hosts (host 1)"
    assert missing((3, 3), [0, 1, 2]) == ""
    assert missing((2, 4), [0]) == "further hosts (1 came; 2 to 4 are wanted)"
    members = {0: member(0, Ending()), 1: member(1), 2: member(2)}
    assert late(members) == "the ranks of host 1 (n1), host 2 (n2) to end"
    assert late({1: member(1)}) == ""


def test_ranks_have_the_grace_from_the_last_one_that_saved_on(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    members = {0: member(0, saved(60)), 1: member(1, saved(5)), 2: member(2)}
    assert not overdue(members, 30)
    assert overdue(members, 1)
    assert not overdue({0: member(0, saved(60, signal=0)), 1: member(1)}, 30)


def test_a_newcomer_of_another_run_or_without_a_place_is_refused():
    message = {"index": 2, "host": "n2", "facts": {"the command": "a"}}
    assert misfit(message, 3, {"the command": "a"}) == ""
    assert "expected an index from 0 to 1" in misfit(message, 2, {"the command": "a"})
    assert "differ in the command: found 'a' there, 'b'" in misfit(message, 3, {"the command": "b"})


def test_restarts_of_a_host_are_counted():
    failure = RankEnd(rank=0, host="n", pid=1, code=1, time=1.0)
    job = HostJob(launch=LaunchConfig(max_restarts=2), arguments=(), ranks=1, variables={},
                  private=None, config=None)  # fmt: skip
    host = SingleHost(job)
    again = [host.conclude(Ending(failures=(failure,))).again for _ in range(3)]
    assert again == [True, True, False]
