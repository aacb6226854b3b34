"""The watch tells a hang once, and once that ranks go on, from states that were made up."""

from types import SimpleNamespace

import pytest

from drivetrain_launch.ranks import watch as watching
from drivetrain_launch.ranks.watch import HangWatch, Hosts
from waiting_ranks import operation, view


def seen(rank, submitted, seconds, **facts):
    waits = operation(submitted, 9 if seconds else 0, seconds, name="all_reduce 9")
    return view(rank, waits, **facts).to_json()


def test_a_hang_is_told_once_and_its_end_once():
    said, views = [], {}
    hosts = Hosts(show=lambda shown: None, others=lambda: views)
    watch = HangWatch([], hosts=hosts, stops=False, say=said.append)
    hangs = {0: seen(0, 9, 50.0), 1: seen(1, 8, 0.0)}
    goes_on = {0: seen(0, 9, 0.0), 1: seen(1, 9, 0.0)}
    for states in (goes_on, hangs, hangs, goes_on, goes_on):
        views.update(states)
        watch.look()
    sentence, end = said
    assert sentence.startswith("rank 1 on n1 has been in the forward for 0 s; rank 0 waits")
    assert end == "the ranks go on"
    assert watch.hang is None


def test_a_hang_ends_the_run_where_it_shall(tmp_path):
    said, views = [], {0: seen(0, 9, 0.0, still_s=70.0), 1: seen(1, 8, 0.0, stack="line\n" * 32)}
    hosts = Hosts(show=lambda shown: None, others=lambda: views)
    watch = HangWatch([], hosts=hosts, stops=True, folder=tmp_path, say=said.append)
    watch.look()
    assert "no rank waits there" in said[0]
    assert watch.hang is None, "nothing proves that the rank is stuck"
    views[0] = seen(0, 9, 50.0)
    watch.look()
    assert watch.hang.culprits == [1]
    assert said[-1].splitlines()[-1].strip() == "... 2 more lines"
    assert {path.name for path in tmp_path.iterdir()} == {"hang-1.json", "hang-2.json"}


def test_a_rank_is_asked_once_in_each_rest(tmp_path, monkeypatch):
    """Host 0 sees the stacks of the rest at hand, not those of an earlier one."""
    rests, shown, asked = iter((50.0, 50.5, 0.0, 50.0, 50.0)), [], []
    moments = iter((1050.0, 1050.5, 1060.0, 1110.0, 1120.0))

    states = ["stopped", "", "", "", ""]

    class Reader:
        rank, pid, path = 0, 1, tmp_path / "board"
        read = staticmethod(lambda: view(0, still_s=next(rests), state=states.pop()))

    monkeypatch.setattr(watching, "ask", lambda *place: asked.append(0) or f"stack {len(asked)}")
    monkeypatch.setattr(watching, "ask_flights", lambda boards: {})
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    hosts = Hosts(show=shown.extend, others=dict, judges=False)
    watch = HangWatch([Reader], hosts=hosts, say=pytest.fail)
    monkeypatch.setattr(watching, "SHOW_S", 0.0)
    for _ in states[:]:
        watch.look()
    assert [rank["stack"] for rank in shown] == ["stack 1", "stack 1", "", "stack 2", ""]
