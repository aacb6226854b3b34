"""Which rank failed first, and how the user is told."""

from types import SimpleNamespace

import pytest

from drivetrain_launch.ranks.failure import Failure, first, report


def failure(rank, time, *, collateral=False, code=1):
    return Failure(rank=rank, pid=1, code=code, time=time, collateral=collateral)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, 10.0), failure(1, 9.5)], 1),
        ([failure(0, 10.0, collateral=True), failure(1, 10.5)], 1),
        ([failure(0, 10.0, collateral=True), failure(1, 100.0)], 0),
        ([failure(0, 10.0, collateral=True), failure(1, 9.0, collateral=True)], 1),
    ],
)
def test_first_failure(failures, rank):
    assert first(failures).rank == rank


def test_rank_that_the_agent_stopped_is_not_the_first():
    stopped = SimpleNamespace(message="Signal 15", exitcode=-15, pid=10, timestamp=5)
    error = {"message": "ValueError: x", "extraInfo": {"py_callstack": "TB", "time": 6.5}}
    raised = SimpleNamespace(message=error, exitcode=1, pid=11, timestamp=6)
    text, code = report({0: stopped, 1: raised})
    assert text.startswith("rank 1 failed first")
    assert "\n  TB\n" in text
    assert text.endswith("stopped with it: rank 0")
    assert code == 1
