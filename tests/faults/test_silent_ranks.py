"""Ranks that are there and do not do their part: stopped, stuck, slow, or wrong in silence."""

import os
import re
import signal
import threading
import time

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, RankMismatchError
from faulty_trainings import ENDED_S, signal_all
from waits import wait_until

TIMEOUT_S = 3.0
NAMED_S = 10.0
"""A rank that others wait for is named so soon; see ``took``."""

ENDED = f"timeout of {TIMEOUT_S:g} s: all have ended"

QUICK = ("--set", f"launch.timeout_s={TIMEOUT_S:g}", "--set", "launch.start_timeout_s=600")
SLOW = {"step": "time.sleep(0.1)"}
PID = "open(f'pid-{rank}', 'w').write(str(os.getpid()))"


def pid_of(trainings, rank):
    path = trainings.folder / f"pid-{rank}"
    wait_until(lambda: path.exists() and len(trainings.losses()) >= 4, "training")
    return int(path.read_text())


@pytest.mark.exhaustive
def test_a_stopped_rank_ends_the_run_within_the_timeout(trainings, took):
    with trainings.start("run", *QUICK, faults=SLOW | {"start": PID}, steps=400) as process:
        stopped = pid_of(trainings, 1)
        begin = time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        done = process.wait()
        seconds = time.monotonic() - begin
    assert done.returncode == 5, done.stderr
    assert re.search(r"^rank 0 failed first .* exit code 5\)$", done.stderr, re.MULTILINE)
    assert "stopped with it: rank 1" in done.stderr
    assert seconds > TIMEOUT_S - 1
    took("F4", ENDED, seconds, bar=TIMEOUT_S + ENDED_S)
    assert trainings.checkpoints()[0] == "checkpoint_0"


@pytest.mark.exhaustive  # it waits for the ten seconds
def test_a_rank_that_others_wait_for_is_named_within_ten_seconds(trainings, took):
    stops = ("--on-hang", "stop")
    with trainings.start("run", *stops, faults=SLOW | {"start": PID}, steps=400) as process:
        stopped = pid_of(trainings, 1)
        begin = time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: "was stopped by a signal" in process.said(), "named")
        named = time.monotonic() - begin
        done = process.wait()
    assert done.returncode == 5, done.stderr
    took("F4", "named", named, bar=NAMED_S)


# A pattern that takes longer than any run, in C code that never lets go of Python's lock.
HOLD = (
    "rank == 1 and step == 4 and "
    "(open('fault', 'w').write(str(time.time())), re.match('(a+)+b', 'a' * 60))"
)


@pytest.mark.exhaustive
def test_a_rank_that_holds_the_interpreter_ends_the_run_within_the_timeout(trainings, took):
    done = trainings.run("run", *QUICK, faults={"step": HOLD})
    assert done.returncode == 5, done.stderr
    assert re.search(r"^rank 0 failed first .* exit code 5\)$", done.stderr, re.MULTILINE)
    assert "stopped with it: rank 1" in done.stderr
    seconds = time.time() - float((trainings.folder / "fault").read_text())
    took("F5", ENDED, seconds, bar=TIMEOUT_S + ENDED_S)


@pytest.mark.exhaustive
@pytest.mark.alone  # it compares the times of ranks
def test_a_rank_that_is_held_up_is_named(trainings, took):
    """The system gives it three of ten parts of the time, as on a host with another job."""
    options = ("--set", "launch.straggler_every_s=1.2", "--set", "launch.straggler_margin=1")
    work = {
        "start": PID,
        "step": "[torch.randn(200, 200) @ torch.randn(200, 200) for _ in range(40)]",
    }
    faults = {**work, "backward": work["step"]}
    with trainings.start("run", *options, faults=faults, steps=4000, every=10**6) as process:
        pid, over = pid_of(trainings, 1), threading.Event()

        def hold_up():
            while not over.is_set():
                signal_all([pid], signal.SIGSTOP)
                time.sleep(0.07)
                signal_all([pid], signal.SIGCONT)
                time.sleep(0.03)

        thread = threading.Thread(target=hold_up)
        begin = time.monotonic()
        thread.start()
        try:
            wait_until(lambda: "slower than the others" in process.said(), "named")
            took("F6", "looking each 1.2 s: named", time.monotonic() - begin)
            said = process.said()
        finally:
            over.set()
            thread.join()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait().returncode == 130
    assert re.findall(r"^rank (\d) on host \S+ is slower", said, re.MULTILINE) == ["1"], said


@pytest.mark.ranks(2)
def test_a_reduction_that_is_wrong_on_one_rank_is_found():
    accelerator = Accelerator(cpu=True, config={"check_replicas_every": 2})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(*, wrong):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        if wrong:
            gradient = next(iter(accelerator.strategy_of(model).gradients()))
            gradient.view(-1)[0] += 0.25
        optimizer.step()
        optimizer.zero_grad()

    for number in (1, 2, 3):
        step(wrong=number == 3 and accelerator.process_index == 1)
    with pytest.raises(RankMismatchError, match=r"step 4.*0\.weight"):
        step(wrong=False)
