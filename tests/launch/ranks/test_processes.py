"""Rank processes that end in no usual way."""

import os
import signal
import sys
import time

import pytest

from drivetrain_launch.ranks import engine as processes
from drivetrain_launch.ranks.engine import Output, RankProcesses
from drivetrain_launch.ranks.failure import Ending, Signals, Stopped, judge, report


def test_a_process_that_sigkill_does_not_end_is_reported_and_not_waited_for(tmp_path, monkeypatch):
    command = (sys.executable, "-c", "import time; time.sleep(3600)")
    monkeypatch.setattr(processes, "KILLED_S", 0.3)
    # As if the kernel waited for a disk in each process of the ranks: signals do not arrive.
    monkeypatch.setattr(processes.os, "killpg", lambda pid, number: None)
    variables = {rank: dict(os.environ) for rank in (1, 2)}
    ranks = RankProcesses(command, variables, tmp_path, Output(tmp_path / "logs"))
    try:
        ranks.stop(signal.SIGTERM, 0.2)
        assert ranks.over
        assert ranks.failed is False  # nothing that the launcher would stop them for again
        ending = ranks.ending()
        pids = ranks.pids_by_rank
    finally:
        monkeypatch.undo()
        for pid in ranks.pids_by_rank.values():
            os.killpg(pid, signal.SIGKILL)
        for process in ranks._processes.values():
            process.wait()
    assert (ending.stopped, ending.ended) == ((), ())
    assert [failure.rank for failure in ending.failures] == [1, 2]
    text, code = report(Ending.from_json(ending.to_json()).failures)
    assert code == 6
    assert text.startswith("rank 1 failed first (host ")
    assert f"pid {pids[1]}, the process does not end)" in text
    assert f"process {pids[1]} of rank 1 does not end after SIGKILL, state S (sleeping); " in text
    assert f"rank 2 failed, too: process {pids[2]} of rank 2 does not end" in text
    assert not judge({0: ending}, 0).again


# --- files of the ranks' output: a run keeps those of the run before it ---


def test_a_second_run_keeps_the_logs_of_the_first(tmp_path):
    for text in (b"first", b"second", b"third"):
        output = Output(tmp_path)
        stdout, _ = output.streams(1)
        stdout.write(text)
        output.finish()
    found = {path.name: path.read_bytes() for path in tmp_path.glob("*stdout*")}
    assert found == {
        "rank-1.stdout.log": b"third",
        "rank-1.stdout.1.log": b"first",
        "rank-1.stdout.2.log": b"second",
    }


def test_lines_in_another_encoding_are_shown(capsys):
    output = Output(None)
    _, stderr = output.streams(1)
    stderr.write(b"\xe9t\xe9\nlast")
    output.follow()
    output.finish()
    assert capsys.readouterr().err == "[rank1]: \ufffdt\ufffd\n[rank1]: last\n"


# --- signals to the launcher: which are kept, and which count once ---


def test_a_notice_that_comes_twice_counts_once_and_ctrl_c_each_time(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    with Signals() as signals:
        signals.record(True)
        for number in (signal.SIGUSR1, signal.SIGINT) * 2:
            signal.raise_signal(number)
        assert signals.take() == [signal.SIGUSR1, signal.SIGINT, signal.SIGINT]
        assert signals.take() == []
        signals.record(False)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)
