"""Ranks that die, and launchers that are told to stop: runs go on bit by bit, or end at once."""

import os
import random
import signal
import time

import pytest

from drivetrain.checkpoint.loading import find_problems
from faulty_trainings import ENDED_S, STEPS, FaultyTrainings
from waits import PATIENCE_S, wait_until

KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The weights, and the losses by step, of a run that nothing disturbs."""
    trainings = FaultyTrainings(tmp_path_factory.mktemp("calm"))
    done = trainings.run()
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in trainings.losses()] == list(range(1, STEPS + 1))
    return trainings.weights(), dict(trainings.losses())


def check_equal(trainings, calm):
    """Check that weights and each loss are those of the calm run, bit by bit."""
    weights, losses = calm
    assert trainings.weights() == weights
    taken = trainings.losses()
    assert {step for step, _ in taken} == set(losses)
    assert [pair for pair in taken if losses[pair[0]] != pair[1]] == []


@pytest.mark.complete
@pytest.mark.parametrize(
    "point",
    [
        "backward",
        pytest.param("step", marks=pytest.mark.exhaustive),
        pytest.param("update", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_goes_on_after_a_killed_rank_as_if_nothing_had_happened(trainings, calm, point):
    fault = f"rank == 1 and step == 8 and once('killed') and {KILL}"
    done = trainings.run("run", "--max-restarts", "1", faults={point: fault})
    assert done.returncode == 0, done.stderr
    assert "rank 1 failed first" in done.stderr
    assert "killed by SIGKILL" in done.stderr
    assert done.stderr.count("starting all ranks again") == 1
    check_equal(trainings, calm)
    assert [step for step, _ in trainings.losses()].count(7) == 2  # after the save of step 6


SEGMENTATION = "ctypes.string_at(1)"
NOTE = "open('fault', 'w').write(str(time.time()))"


def since_the_fault(trainings):
    return time.time() - float((trainings.folder / "fault").read_text())


EIO = "setattr(os, 'fsync', lambda fd: (_ for _ in ()).throw(OSError(5, 'Input/output error')))"
CHECKED = ("--set", "check_replicas_every=1")
FAILURES = {
    "F2": ("backward", "1 / 0", (), 1, "ZeroDivisionError"),
    "F8": ("step", "os.kill(os.getpid(), signal.SIGTERM)", (), 75, ""),
    "F13": ("step", EIO, (), 4, "Input/output error"),
    "F20": ("backward", "accelerator.gather(loss.detach())", (), 5, "gather"),
    "F27": ("backward", "loss.data.fill_(torch.nan)", (), 9, "NonFiniteError"),
    "F29": ("update", "next(model.parameters()).data.view(-1)[0].add_(1)", CHECKED, 3, "step 6"),
}
"""By row: where a rank does what, options of the launcher, the exit code, and a part of what is
said."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", FAILURES)
def test_all_end_soon_after_what_one_rank_does(trainings, took, row):
    point, what, options, code, said = FAILURES[row]
    fault = f"rank == 1 and step == 6 and ({NOTE}, {what})"
    done = trainings.run("run", *options, faults={point: fault})
    seconds = since_the_fault(trainings)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    took(row, "all have ended", seconds, bar=ENDED_S)
    # Before step 6 and, where the notice comes, after it: by the script, and by the notice.
    saved = ["checkpoint_1", "checkpoint_2"] if code == 75 else ["checkpoint_0"]
    assert trainings.checkpoints() == saved


@pytest.mark.exhaustive
@pytest.mark.parametrize(("how", "name"), [(KILL, "SIGKILL"), (SEGMENTATION, "SIGSEGV")])
def test_all_end_soon_after_a_rank_that_died(trainings, took, how, name):
    fault = f"rank == 1 and step == 4 and ({NOTE}, {how})"
    done = trainings.run(faults={"backward": fault})
    seconds = since_the_fault(trainings)
    assert done.returncode == 6, done.stderr
    assert "rank 1 failed first" in done.stderr
    assert f"killed by {name}" in done.stderr
    assert "stopped with it: rank 0" in done.stderr
    if name == "SIGSEGV":
        assert "Fatal Python error: Segmentation fault" in done.stderr
        assert "run.py" in done.stderr  # the line of the script, in the stack of the thread
    took("F1" if name == "SIGKILL" else "F3", "all have ended", seconds, bar=ENDED_S)
    assert trainings.checkpoints() == ["checkpoint_0"]


SLOW = {"step": "time.sleep(0.15)"}


def tell_launcher(trainings, process, number, after=5):
    wait_until(lambda: len(trainings.losses()) >= after, "training")
    os.kill(process.pid, number)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("row", "number"), [("F7", signal.SIGTERM), ("F9", signal.SIGUSR1)])
def test_a_launcher_that_is_told_to_stop_saves_and_the_next_one_goes_on(
    trainings, calm, took, row, number
):
    with trainings.start(faults=SLOW, every=100) as process:
        tell_launcher(trainings, process, number)
        begin = time.monotonic()
        done = process.wait()
        took(row, "saved and ended", time.monotonic() - begin)
    assert done.returncode == 75, done.stderr
    taken = len(trainings.losses())
    assert taken < STEPS
    assert trainings.checkpoints() == ["checkpoint_0"]
    done = trainings.run(faults=SLOW, every=100)
    assert done.returncode == 0, done.stderr
    assert trainings.losses()[taken][0] == taken + 1
    check_equal(trainings, calm)


WAITING_DISK = (
    "fsync = os.fsync; "
    "os.fsync = lambda fd: (time.sleep(3600 if os.path.exists('slow') else 0), fsync(fd))"
)


def test_a_second_notice_ends_a_save_and_leaves_the_checkpoint_before(trainings, took):
    with trainings.start(faults=SLOW | {"start": WAITING_DISK}) as process:
        wait_until(lambda: "checkpoint_0" in trainings.checkpoints(), "saved")
        (trainings.folder / "slow").touch()
        tell_launcher(trainings, process, signal.SIGTERM)
        drafts = lambda: [n for n in trainings.checkpoints() if n.startswith(".")]  # noqa: E731
        wait_until(drafts, "saving")
        time.sleep(2.1)  # a notice that comes again within 2 s counts as the same
        begin = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        done = process.wait()
        seconds = time.monotonic() - begin
        took("F10", "all have ended", seconds, bar=ENDED_S)
    assert done.returncode == 143, done.stderr
    checkpoint = trainings.folder / "run" / "checkpoints" / "checkpoint_0"
    assert find_problems(checkpoint) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [2, 20])
def test_random_kills_change_nothing(trainings, calm, kills):
    seed = int(os.environ.get("DRIVETRAIN_TEST_SEED", random.randrange(2**32)))
    print(f"seed {seed}: set DRIVETRAIN_TEST_SEED to see the same kills again")
    draw = random.Random(seed)
    points = ("step", "backward", "update")
    # A step at most twice: three attempts in a row without a newer checkpoint end a run.
    steps = draw.sample([*range(1, STEPS + 1)] * 2, kills)
    plan = {(step, draw.choice(points), draw.randrange(2)) for step in steps}
    once = "once(f'{step}-{rank}-"
    faults = {
        point: f"(step, {point!r}, rank) in {plan} and {once}{point}') and {KILL}"
        for point in points
    }
    restarts = ("--max-restarts", str(kills))
    done = trainings.run("run", *restarts, faults=faults, every=1, timeout=2.5 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = {path.name for path in (trainings.folder / "run").glob("*-[01]-*")}
    assert found == {f"{step}-{rank}-{point}" for step, point, rank in plan}
    restarted = done.stderr.count("starting all ranks again")
    assert 0 < restarted <= len(plan)  # both ranks may die in one attempt
    check_equal(trainings, calm)
