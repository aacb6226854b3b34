"""Which rank failed first, what follows for all hosts, and how the user is told."""

import json
import runpy
import signal
import sys
import time
from dataclasses import replace

import pytest

from drivetrain.runtime.board import PREEMPTED
from drivetrain_launch.ranks.failure import (
    LONGEST_TEXT,
    MOST_IDLE,
    NO_PROGRESS,
    Ending,
    IdleAttempts,
    RankEnd,
    blamed,
    first,
    judge,
    report,
)
from drivetrain_launch.ranks.watch import Hang
from drivetrain_launch.ranks.worker import (
    LOGS_VARIABLE,
    code_of,
    fail,
    lost_peer,
    run,
    traceback_of,
)
from waiting_ranks import operation, view


def failure(rank, time, *, collateral=False, code=1, summary=""):
    return RankEnd(
        rank=rank, host="n1", pid=1, code=code, time=time, collateral=collateral, summary=summary
    )


def end(rank, code=0, time=1.0):
    return RankEnd(rank=rank, host="n2", pid=1, code=code, time=time)


def test_first_failure():
    for failures, rank in (
        ([failure(0, 10.0), failure(1, 9.5)], 1),
        ([failure(0, 10.0, collateral=True), failure(1, 10.5)], 1),
        ([failure(0, 10.0, collateral=True), failure(1, 100.0)], 0),
        ([failure(0, 10.0, collateral=True), failure(1, 9.0, collateral=True)], 1),
    ):
        assert first(failures).rank == rank, failures


def test_rank_that_was_stopped_is_not_the_first():
    text, code = report([failure(1, 6.5, summary="ValueError: x")], (), [0])
    assert text.startswith("rank 1 failed first (host n1, pid 1, exit code 1)")
    assert text.endswith("  ValueError: x\nstopped with it: rank 0")
    assert code == 1


def test_rank_that_somebody_terminated_is_no_victim_of_another():
    text, code = report([failure(1, 6.5, code=-signal.SIGTERM)], [end(0)])
    assert code == 6
    assert text == "rank 1 failed first (host n1, pid 1, killed by SIGTERM)"
    assert failure(1, 6.5, code=-40).ending == "killed by signal 40", "a signal without a name"


def test_errors_of_other_ranks_are_told_once_and_those_of_victims_never():
    texts = ("ValueError: x", "ValueError: x", "OSError: y", "a peer is gone")
    failures = [failure(i, i, summary=each, collateral=i == 3) for i, each in enumerate(texts)]
    lines = report(failures)[0].splitlines()
    assert lines[1:3] == ["  ValueError: x", "rank 2 failed, too: OSError: y"]
    assert lines[3] == "stopped with it: ranks 1, 2, 3"


def test_rank_that_ended_early_is_named_before_the_rank_that_waited():
    others = [end(1), end(2, time=0.5), end(3)]
    text, code = report([failure(0, 10.0, collateral=True, code=5)], others)
    assert text.startswith("rank 2 ended too early (host n2, exit code 0): rank 0 waited for it")
    assert code == 5


def test_ages_cross_hosts_instead_of_moments(monkeypatch):
    now = time.time()
    failed = replace(failure(0, now - 3), traceback="a" * LONGEST_TEXT + "z")
    values = Ending(failures=(failed,), ended=(end(1, time=now - 2),)).to_json()
    monkeypatch.setattr(time, "time", lambda: now - 120)  # a clock that is two minutes behind
    read = Ending.from_json(values)
    assert read.failures[0].traceback == "a" * (LONGEST_TEXT - 1) + "z", "its end counts"
    assert read.failures[0].time == pytest.approx(now - 123, abs=0.5)
    assert read.ended[0].time == pytest.approx(now - 122, abs=0.5)


def test_verdict():
    for endings, code, again in (
        ([Ending(ended=(end(0),)), Ending(ended=(end(1),))], 0, False),
        ([Ending(ended=(end(rank, PREEMPTED),)) for rank in range(2)], PREEMPTED, False),
        ([Ending(ended=(end(0, PREEMPTED),), signal=15), Ending(ended=(end(1),))], 143, False),
        ([Ending(stopped=(0,), signal=15), Ending(failures=(failure(1, 1.0),))], 143, False),
        ([Ending(stopped=(0,)), Ending(failures=(failure(1, 1.0, code=7),))], 7, True),
        ([Ending(stopped=(0,)), Ending(failures=(failure(1, 1.0, code=2),))], 2, False),
        ([Ending(stopped=(0,)), Ending(failures=(failure(1, 1.0, code=4),))], 4, False),
    ):
        found = judge(dict(enumerate(endings)), 1)
        assert (found.code, found.again) == (code, again), endings
        assert not judge(dict(enumerate(endings)), 0).again, endings
        said = f"no restart: an error with exit code {code} would only come again"
        assert code not in (2, 4) or said in found.text, endings


def test_a_lost_host_is_the_cause_unless_a_rank_has_one_of_its_own():
    lost = {1: "host 1 (n2) is lost: silence"}
    victim = Ending(failures=(failure(0, 1.0, collateral=True),))
    found = judge({0: victim}, 0, lost)
    assert (found.text, found.code) == (lost[1], 5)
    cause = Ending(failures=(failure(0, 1.0, code=9, summary="ValueError: x"),))
    assert judge({0: cause}, 0, lost).code == 9


def test_errors_that_cannot_heal_use_no_restart():
    for code in (2, 4, 9, NO_PROGRESS):
        verdict = judge({0: Ending(failures=(failure(0, 1.0, code=code),))}, 3)
        assert (verdict.again, verdict.code) == (False, code), code
        assert f"exit code {code} would only come again" in verdict.text, code


def test_progress_is_a_checkpoint_of_a_later_step_than_any_before():
    for saved, idle in (
        ([-1, -1, -1], [1, 2, 3]),
        ([-1, 10, 10, 10, 10], [1, 0, 1, 2, 3]),
        ([10, 20, 20, 30], [0, 0, 1, 0]),
        ([0, 0], [0, 1]),
        ([10, 5, 10], [0, 1, 2]),  # after a return to an older checkpoint nothing newer came
        ([None, None, None, None], [0, 0, 0, 0]),  # a script without an Accelerator tells nothing
    ):
        progress = IdleAttempts()
        endings = [[Ending(saved=steps), Ending()] for steps in saved]
        assert [progress.after(each) for each in endings] == idle, saved


def test_attempts_without_progress_end_with_a_code_of_their_own():
    failed = {0: Ending(failures=(failure(0, 1.0, summary="OSError: x"),))}
    assert judge(failed, 7, idle=MOST_IDLE - 1).again
    for restarts_left in (0, 7):
        verdict = judge(failed, restarts_left, idle=MOST_IDLE)
        assert (verdict.again, verdict.code) == (False, NO_PROGRESS), restarts_left
        assert "OSError: x" in verdict.text, restarts_left
        said = "3 attempts in a row have failed and saved no newer checkpoint"
        assert verdict.text.endswith(said), restarts_left
    assert judge({0: Ending(ended=(end(0),))}, 7, idle=MOST_IDLE).code == 0


def test_a_hang_is_the_failure_of_its_culprit_and_began_with_the_wait(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    waits = operation(seconds=40.0, name="all_reduce 9")
    views = {rank: view(rank, pid=rank + 7) for rank in (0, 1)}
    hang = Hang(
        kind="absent", culprits=[1], waiting=[0], operation=waits, waited_s=40.0, views=views
    )
    lost = failure(0, 999.0, collateral=True)
    found = blamed(Ending(failures=(lost,), stopped=(0, 1)), hang)
    assert found.stopped == (0,)
    assert first(found.failures).rank == 1
    assert found.failures[0].time == 960.0
    text, code = report(found.failures, (), found.stopped)
    assert text.startswith("rank 1 failed first (host n1, pid 8, exit code 5)")
    assert text.endswith("stopped with it: rank 0")
    assert code == 5
    assert blamed(found, None) is found
    nobody = blamed(Ending(), replace(hang, kind="none", culprits=[]))
    assert nobody.failures[0].rank == 0, "the first that waits, where all came"


def test_errors_that_only_say_that_a_peer_is_gone():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]")
    script = ValueError("no batch")
    script.__cause__ = lost
    assert lost_peer(lost)
    assert lost_peer(script)
    assert lost_peer(ConnectionResetError(104, "x"))
    assert not lost_peer(RuntimeError("CUDA error: out of memory"))
    assert not lost_peer(ValueError("connection closed by peer"))


def test_exit_codes_of_scripts_are_those_of_python(capsys):
    assert [code_of(SystemExit(code)) for code in (None, 0, 3, "no data", True)] == [0, 0, 3, 1, 1]
    assert capsys.readouterr().err == "no data\n"


def test_a_package_that_cannot_be_run_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "pack_without_main").mkdir()
    (tmp_path / "pack_without_main/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as caught:
        runpy.run_module("pack_without_main", run_name="__main__")
    caught.value.__traceback__ = caught.tb.tb_next  # without the frame of this test
    (line,) = traceback_of(caught.value)
    assert "'pack_without_main' is a package and cannot be directly executed" in line


def test_a_traceback_begins_in_the_script_and_is_printed_once(tmp_path, monkeypatch, capsys):
    """By the launcher; the rank itself prints it where its output is kept."""
    for text, summary, code in (
        ("def x(:\n", "invalid syntax", 1),
        ("raise ValueError('the cause')", "the cause", 1),
        ("from drivetrain.errors import CheckpointError as E; raise E('bad')", "bad", 4),
    ):
        (tmp_path / "train.py").write_text(text)
        monkeypatch.delenv(LOGS_VARIABLE, raising=False)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        for name, value in (("argv", []), ("path", [*sys.path]), ("last_value", None)):
            monkeypatch.setattr(sys, name, value, raising=False)
        with pytest.raises(Exception, match=summary) as caught:
            run([str(tmp_path / "train.py")])
        error = caught.value.with_traceback(caught.tb.tb_next)  # without the frame of this test
        assert fail(error) == code, text
        assert capsys.readouterr().err == "", text
        monkeypatch.setenv(LOGS_VARIABLE, "1")
        fail(error)
        said = json.loads((tmp_path / "error.json").read_text())["message"]
        shown = said["extraInfo"]["py_callstack"]
        assert capsys.readouterr().err == shown, text
        assert summary in said["message"], text
        assert 'train.py", line 1' in shown, text
        assert "runpy" not in shown, text
        assert "worker.py" not in shown, text


def test_a_module_runs_like_python_m(tmp_path, monkeypatch, capsys):
    (tmp_path / "run_as_module").mkdir()
    (tmp_path / "run_as_module/run.py").write_text("import sys; print(__package__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    for name, value in (("argv", []), ("path", [*sys.path])):
        monkeypatch.setattr(sys, name, value)
    assert run(["-m", "run_as_module.run", "--lr", "1"]) == 0
    assert capsys.readouterr().out == "run_as_module ['--lr', '1']\n"
