"""A rank that is alone in a collective learns soon who is missing, and nobody else is accused."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from drivetrain import CollectiveError
from drivetrain.collectives import facts as meeting
from drivetrain.collectives import ring
from drivetrain.communication import gather, reduce, wait_for_everyone
from drivetrain.runtime.world import RankStatus, begin_statuses, leave_status, status_of


def be_hasty(monkeypatch):
    """Let this rank's waits look around early."""
    monkeypatch.setattr(meeting, "FIRST_LOOK_S", 0.2)
    monkeypatch.setattr(ring, "LONG_WAIT_S", 0.2)


WAITS_ELSEWHERE = RankStatus(doing="all_reduce", place="ring", number=5, ranks=[0, 1])


def test_two_statuses_prove_that_a_wait_is_in_vain(monkeypatch):
    monkeypatch.setattr(meeting, "set_status", lambda status: None)
    monkeypatch.setattr(meeting, "running", dict)
    for begun, status, in_vain in (
        ({"ring": 4}, WAITS_ELSEWHERE, True),
        # This rank has begun the other one's operation, which is under way.
        ({"ring": 5}, WAITS_ELSEWHERE, False),
        # The other rank has come here, and waits for a third one.
        ({"ring": 4}, replace(WAITS_ELSEWHERE, reached={"meeting": 2}), False),
        # The other rank does not wait for this one.
        ({"ring": 4}, replace(WAITS_ELSEWHERE, ranks=[1, 2]), False),
        ({}, RankStatus(reached={"meeting": 1}), True),
        ({}, RankStatus(reached={"meeting": 2}), False),
        ({}, None, False),
    ):
        monkeypatch.setattr(meeting, "status_of", lambda rank, status=status: status)
        monkeypatch.setattr(meeting, "reached", lambda begun=begun: begun)
        wait = meeting.Wait("gather", "meeting", 2, [0, 1], 0, [0, 1])
        assert wait.look(meeting.FIRST_LOOK_S / 2) == ""
        assert bool(wait.look(meeting.FIRST_LOOK_S)) == in_vain


@pytest.mark.ranks(2)
def test_a_rank_that_comes_late_is_no_error_and_leaves_no_word(monkeypatch):
    be_hasty(monkeypatch)
    if dist.get_rank() == 1:
        time.sleep(0.5)
    assert gather(torch.tensor(dist.get_rank())).tolist() == [0, 1]
    wait_for_everyone()
    assert status_of(0) is None
    assert status_of(1) is None


@pytest.mark.ranks(2)
def test_a_loop_with_more_rounds_hears_of_the_rank_that_left(monkeypatch):
    be_hasty(monkeypatch)
    begin_statuses()
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveError, match="reduce to the mean on rank 0 .*: rank 1 "):
            reduce(torch.ones(1))
    else:
        leave_status()
