"""Tests on ranks: what passes, what a report shows, and that one test never harms the next."""

import math
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from drivetrain.testing import pool
from waits import wait_until

pytest_plugins = ["pytester"]

INI = """
[pytest]
addopts = --strict-markers --import-mode=importlib -p no:cacheprovider
filterwarnings = error
"""


@pytest.fixture
def project(pytester, monkeypatch):
    pytester.makefile(".ini", pytest=INI)
    pytester.makeconftest("import pytest\n@pytest.fixture\ndef number(): return 7\n")
    monkeypatch.setattr(pool, "GRACE_S", 1.0)
    return pytester


def run(project, body, *args):
    header = "import os, signal, threading, time, warnings\nimport pytest, torch\n"
    project.makepyfile(test_case=header + "import torch.distributed as dist\n" + body)
    return project.runpytest_inprocess(*args)


@pytest.mark.ranks(1)
def test_modules_of_the_setting_are_imported_when_a_rank_starts():
    assert "drivetrain_launch.ranks.engine" in sys.modules


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.ranks(2)
def test_what_is_patched_is_patched_for_one_test(monkeypatch, number):
    assert math.tau != number - 1
    monkeypatch.setattr(math, "tau", number)


def test_failures_are_reported_by_rank_and_harm_no_later_test(project):
    result = run(
        project,
        """
@pytest.mark.ranks(2)
def test_one_rank_raises(number):
    print("printed by", dist.get_rank())
    if dist.get_rank() == 1:
        assert number == 8
    time.sleep(60)

@pytest.mark.ranks(2)
def test_first_in_time_is_first():
    time.sleep(0.3 * (1 - dist.get_rank()))
    raise ValueError(f"from {dist.get_rank()}")

@pytest.mark.ranks(2)
def test_killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.ranks(2)
def test_crash():
    if dist.get_rank() == 0:
        import ctypes
        ctypes.string_at(1)

@pytest.mark.ranks(2)
def test_in_between():  # new ranks, which take a while to be ready
    dist.barrier()

@pytest.mark.ranks(2, timeout=2)
@pytest.mark.timeout(1)
def test_hang():
    if dist.get_rank() == 1:
        time.sleep(60)
    time.sleep(0.5)  # the barrier, too, waits for 2 s
    dist.barrier()

@pytest.mark.ranks(2)
def test_afterwards(number):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert (total.item(), number) == (2, 7)
""",
    )
    result.assert_outcomes(failed=5, passed=2)
    result.stdout.re_match_lines_random(
        [
            r"rank 1 failed: AssertionError: assert 7 == 8",
            r"rank 0 hung: still running 1 s after another rank failed",
            r"printed by 1",
            r".*Captured stdout rank1 call.*",
            r"rank 1 died: the process ended with signal SIGKILL",
            r"rank 0 died: the process ended with signal SIGSEGV",
            r".*ctypes.* in string_at",
            r"rank 1 hung: still running after 2 s",
            r'.*test_case.py", line \d+ in test_hang',
        ]
    )
    result.stdout.fnmatch_lines(["rank 1 failed: ValueError: from 1", "rank 0 failed: ValueError*"])


@pytest.mark.exhaustive
def test_outcomes_other_than_pass_and_fail(project):
    result = run(
        project,
        """
@pytest.mark.ranks(2)
def test_skip():
    pytest.skip("not here")

@pytest.mark.ranks(2)
def test_xfail():
    pytest.xfail("known")

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_marked_xfail():
    raise ValueError

@pytest.mark.ranks(1)
@pytest.mark.parametrize("value", [lambda: 1])
def test_unpicklable(value):
    pass

@pytest.mark.ranks(1)
def test_warning_is_error():
    warnings.warn("careful")

@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:careful")
def test_ignored_warning():
    warnings.warn("careful")
""",
        "-rs",
    )
    result.assert_outcomes(skipped=1, xfailed=2, failed=2, passed=1)
    result.stdout.fnmatch_lines(["*fixture or parameter 'value' (function) cannot be pickled*"])
    result.stdout.fnmatch_lines(["*UserWarning: careful*"])
    result.stdout.fnmatch_lines(["SKIPPED*test_case.py*not here*"])


@pytest.mark.exhaustive
def test_what_a_test_leaves_behind_fails_it(project):
    result = run(
        project,
        """
@pytest.mark.ranks(1)
def test_thread():
    threading.Thread(target=time.sleep, args=(30,), name="left", daemon=True).start()

@pytest.mark.ranks(1)
def test_environment():
    os.environ["LEFT"] = "1"

@pytest.mark.ranks(1)
def test_setting():
    torch.set_default_dtype(torch.float64)

@pytest.mark.ranks(1)
def test_dead_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

@pytest.mark.ranks(1)
def test_afterwards():
    assert "LEFT" not in os.environ
    assert torch.ones(1).dtype is torch.float32
""",
    )
    result.assert_outcomes(failed=4, passed=1)
    result.stdout.fnmatch_lines_random(
        [
            "the thread 'left' still runs*",
            "the variable LEFT changed from None to '1'",
            "torch's default dtype changed from torch.float32 to torch.float64",
            "thread * ended with ZeroDivisionError*",
        ]
    )


@pytest.mark.exhaustive
def test_a_group_that_something_held_for_a_while_is_freed_in_a_later_test(project):
    """The holder is a thread's cycle, which ends behind the test: garbage that nobody walks."""
    result = run(
        project,
        """
import gc, weakref
import torch.distributed as dist

class Holder:
    def __init__(self):
        self.group, self.me = dist.distributed_c10d._get_default_group(), self

@pytest.mark.ranks(2)
def test_first():
    gc.known = weakref.ref(dist.distributed_c10d._get_default_group())
    def hold(holder):
        time.sleep(0.5)
    threading.Thread(target=hold, args=[Holder()]).start()

@pytest.mark.ranks(2)
def test_second():
    assert gc.known() is not None

@pytest.mark.ranks(2)
def test_third():
    assert gc.known() is None
""",
    )
    result.assert_outcomes(passed=3)


@pytest.mark.exhaustive
def test_another_process_takes_the_rank_of_one_where_groups_live_on(project):
    result = run(
        project,
        """
import pathlib
import torch.distributed as dist

KEPT = []

@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", range(8))
def test_keeps_its_group(turn):
    KEPT.append(dist.distributed_c10d._get_default_group())
    assert len(KEPT) == (turn + 1 if turn < 6 else turn - 5)
""",
    )
    result.assert_outcomes(passed=8)


def test_a_wrong_mark_stops_the_run(pytester):
    pytester.makefile(".ini", pytest=INI)
    for mark in ("ranks()", "ranks(0)", "ranks('2')", "ranks(2, seconds=3)", "ranks(2, 3)"):
        pytester.makepyfile(test_case=f"import pytest\n@pytest.mark.{mark}\ndef test_x(): pass\n")
        result = pytester.runpytest_inprocess("--collect-only")
        assert result.ret == pytest.ExitCode.USAGE_ERROR, mark
        result.stderr.fnmatch_lines(["*test_x: expected ranks(n, timeout*"])


@pytest.mark.exhaustive
def test_no_rank_outlives_a_killed_run(tmp_path):
    (tmp_path / "test_case.py").write_text(
        "import pathlib, time, pytest\n"
        "@pytest.mark.ranks(2)\n"
        "def test_long(tmp_path):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'running').touch()\n"
        "    time.sleep(100)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_case.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_until(Path(tmp_path, "running").exists)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(child.is_running() for child in children))
