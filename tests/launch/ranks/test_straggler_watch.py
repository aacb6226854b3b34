"""The launcher compares the times of ranks: twice slow is named, and named once."""

import json
import time
from dataclasses import asdict

from drivetrain.observe.figures import RankTimes
from drivetrain_launch.ranks.watch import StragglerWatch, WorkFiles, work_file


def works(window=1, slow=()):
    return [
        RankTimes(
            rank=rank, host="0@a", window=window, steps=1, seconds=1.0,
            sections={"forward": 0.9 if rank in slow else 0.3},
        )
        for rank in range(3)
    ]  # fmt: skip


def test_twice_in_a_row_is_named_and_once():
    said = []
    watch = StragglerWatch(0.3, said.append)
    for slow in (1, 2, 1):
        watch.take(works(slow=[slow]), 3)
    assert said == []
    watch.take(works(slow=[1]), 3)
    (line,) = said
    assert line.startswith("rank 1 on host a is slower than the others: 900 ms of work in a step")
    watch.take(works(slow=[1]), 3)
    assert said == [line]
    for _ in range(2):  # another attempt: its ranks may be elsewhere
        watch.take(works(slow=[1]), 3, attempt=1)
    assert said == [line, line]


def test_ranks_are_compared_when_all_have_told_new_times():
    said = []
    watch = StragglerWatch(0.3, said.append)
    watch.take(works(slow=[1]), 3)
    for _ in range(3):
        watch.take(works(slow=[1])[:2], 3)
        assert said == []
    watch.hear({"works": [asdict(works(slow=[1])[2])], "size": 3, "attempt": 0})
    assert len(said) == 1


def test_files_are_read_now_and_then_and_each_window_once(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    files = WorkFiles(tmp_path, [0, 1], 8.0)
    path = work_file(tmp_path, 1)
    path.write_text(json.dumps(asdict(works()[1])))
    assert files.read() == []
    now[0] += 2.0
    assert [work.rank for work in files.read()] == [1]
    now[0] += 2.0
    assert files.read() == []
    path.write_text(json.dumps(asdict(works(window=2)[1])))
    assert files.read() == []
    now[0] += 2.0
    assert [work.window for work in files.read()] == [2]
    assert WorkFiles(tmp_path, [1], 0).read() == []
