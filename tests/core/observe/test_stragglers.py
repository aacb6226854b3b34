"""Who is slower than the others by its own work, and the file in which a rank tells its times."""

import pytest

from drivetrain.observe.figures import RankTimes, StepFigures, WorkFile, read_work, stragglers


def work(rank, *, data=0.1, forward=1.0, host="0@a", steps=10, waiting=0.0, **more):
    sections = {"data": data, "forward": forward, "other": 50.0 * rank, "checkpoint": 7.0}
    seconds = data + forward + waiting
    return RankTimes(
        rank=rank, host=host, steps=steps, seconds=seconds, sections=sections, waiting=waiting,
        **more,
    )  # fmt: skip


def ranks(works, margin=0.3):
    return [each.ranks for each in stragglers(works, margin)]


def test_the_rank_with_more_work_is_named_by_the_margin():
    (found,) = stragglers([work(0, waiting=0.9), work(1, data=0.9), work(2, waiting=0.9)], 0.3)
    assert str(found) == (
        "rank 1 on host a is slower than the others: 190 ms of work in a step against 110 ms; most "
        "of the difference is in data, 90 ms against 10 ms"
    )
    assert found.ratio == pytest.approx(1.9 / 1.1)

    assert ranks([work(0, waiting=5.0), work(1), work(2, waiting=20.0)]) == []

    slow = [work(0), work(1, forward=1.35), work(2)]  # 1.45 s against 1.1 s: 32 % longer
    assert ranks(slow, 0.35) == []
    assert ranks(slow, 0.3) == [(1,)]

    assert ranks([work(0, waiting=90.0), work(1, forward=2.0, waiting=89.0)]) == []

    assert ranks([work(0), work(1, forward=2.0), work(2, forward=2.0)]) == [(1,), (2,)]
    assert ranks([work(0)]) == []
    assert ranks([work(0, steps=0), work(1)]) == []


def test_ranks_are_compared_with_those_that_do_the_same_work():
    stages = [
        *(work(rank, peers="pp=0") for rank in range(2)),
        *(work(rank, forward=3.0, peers="pp=1") for rank in (2, 3)),
    ]
    assert ranks(stages) == []
    slow = work(1, forward=2.0, peers="pp=0")
    assert ranks([stages[0], slow, *stages[2:]]) == [(1,)]
    assert ranks([work(0, peers="pp=0"), work(1, forward=9.0, peers="pp=1")]) == []


def test_all_ranks_of_a_host_are_one_straggler():
    hosts = [work(rank, host=f"{rank // 2}@n{rank // 2}") for rank in range(6)]
    hosts[2:4] = [work(2, forward=2.0, host="1@n1"), work(3, forward=1.9, host="1@n1")]
    (found,) = stragglers(hosts, 0.3)
    assert (found.ranks, found.is_host, found.seconds) == ((2, 3), True, pytest.approx(0.2))
    assert str(found).startswith("host n1 (ranks 2, 3) is slower than the others: 200 ms of work")
    partly = [work(rank, host=f"{rank // 3}@n{rank // 3}") for rank in range(9)]
    partly[3:5] = [work(rank, forward=2.0, host="1@n1") for rank in (3, 4)]
    assert ranks(partly) == [(3,), (4,)]
    one_host = [work(0, forward=9.0), work(1), work(2, forward=9.0), work(3), work(4)]
    assert ranks(one_host) == [(0,), (2,)]
    mostly_slow = [work(0, forward=9.0), work(1), work(2, forward=9.0), work(3, forward=9.0)]
    assert ranks(mostly_slow) == []  # slow is usual here


def test_a_rank_tells_its_times_once_in_a_while(tmp_path):
    path = tmp_path / "rank-3.work.json"
    file = WorkFile(path, 1.0, {"rank": 3, "host": "0@a", "peers": "pp=1", "device": "CPU"})
    step = StepFigures(step=1, seconds=0.6, sections={"data": 0.1}, waiting={"dp": 0.2, "tp": 0.1})
    file.take(StepFigures(step=1, seconds=60.0))  # the first step, which compiles
    file.take(step)
    assert read_work(path) is None
    file.take(step)
    found = read_work(path)
    assert (found.rank, found.host, found.peers, found.window) == (3, "0@a", "pp=1", 1)
    assert (found.steps, found.seconds) == (2, pytest.approx(1.2))
    assert (found.sections["data"], found.waiting) == pytest.approx((0.2, 0.6))
    file.take(step)
    assert read_work(path) == found
    file.take(step)
    assert (read_work(path).window, read_work(path).steps) == (2, 2)
    path.write_text('{"rank": 1')
    assert read_work(path) is None
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
