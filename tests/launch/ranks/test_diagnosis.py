"""Who is accused when ranks wait, from states of ranks that were made up."""

import waiting_ranks
from drivetrain_launch.ranks.answers import RankView, main_thread, script_site
from drivetrain_launch.ranks.watch import diagnose, mismatch

WORKER = str(__import__("drivetrain_launch.ranks.worker", fromlist=["worker"]).__file__)


def stack(line: int, *inner: str) -> str:
    frames = [f'  File "{file}", line 7 in call' for file in inner]
    return "\n".join(
        [
            "Thread 0x00007f0000000001 (most recent call first):",
            '  File "/home/me/other.py", line 1 in background',
            "",
            "Current thread 0x00007f0000000002 (most recent call first):",
            *frames,
            f'  File "/home/me/train.py", line {line} in <module>',
            f'  File "{WORKER}", line 70 in run',
            f'  File "{WORKER}", line 55 in main',
        ]
    )


def operation(submitted, running=0, seconds=0.0, **facts):
    usual = {"ranks": (0, 1, 2, 3), "checksum": 5, "size": "10 float32"}
    usual["name"] = f"all_reduce {running:,} 'blocks.7'"
    return waiting_ranks.operation(submitted, running, seconds, **usual | facts)


def rank(number, *operations, **facts):
    return RankView(
        rank=number, host=f"n{number // 2}", pid=100 + number, operations=operations, **facts
    )


def views(*ranks):
    return {each.rank: each for each in ranks}


def waiting(number, **facts):
    return rank(number, operation(1204, 1204, 42.0), stack=stack(57), **facts)


def test_nobody_waits_for_long():
    moving = [rank(number, operation(1204, 1204, 2.0)) for number in range(4)]
    assert diagnose(views(*moving), limit_s=lambda _: 8.0) is None


def test_a_rank_in_the_data_loader():
    loading = stack(31, "/venv/lib/site-packages/torch/utils/data/dataloader.py")
    absent = rank(3, operation(1203), section="other", still_s=42.4, stack=loading)
    hang = diagnose(views(waiting(0), waiting(1), waiting(2), absent), limit_s=lambda _: 8.0)
    assert hang.sentence() == (
        "rank 3 on n1 has been in the data loader for 42 s (train.py:31); ranks 0 to 2 wait for it "
        "in all_reduce 1,204 'blocks.7' at train.py:57"
    )
    assert hang.to_json()["culprits"] == [3]
    assert hang.to_json()["ranks"][3]["stack"] == loading


def test_the_rank_at_the_root_is_accused_and_not_the_one_that_waits_for_it():
    other = operation(3, 3, 20.0, place="meeting", name="gather", checksum=0)
    between = rank(1, operation(1203), other)
    root = rank(2, operation(1203), operation(2, place="meeting"), section="forward", still_s=50.0)
    hang = diagnose(views(waiting(0), between, root), limit_s=lambda _: 8.0)
    assert list(hang.culprits) == [2]
    assert "rank 2 on n1 has been in the forward for 50 s; rank 0 waits for it" in hang.sentence()


def test_two_ranks_that_wait_for_each_other():
    other = operation(3, 3, 20.0, place="meeting", name="gather", checksum=0)
    hang = diagnose(views(waiting(0), rank(1, operation(1203), other)), limit_s=lambda _: 8.0)
    assert hang.kind == "circle"
    said = "rank 1 on n0 waits in gather; rank 0 waits for it in all_reduce 1,204"
    assert said in hang.sentence()


def test_another_operation_with_the_same_number():
    odd = operation(1204, 1204, 41.0, checksum=6, name="all_gather 1,204 'u'", size="7 int64")
    hang = diagnose(views(waiting(0), rank(1, odd, stack=stack(33))), limit_s=lambda _: 8.0)
    assert hang.sentence() == (
        "rank 0 waits in all_reduce 1,204 'blocks.7' at train.py:57 of 10 float32, but rank 1 in "
        "all_gather 1,204 'u' of 7 int64 at train.py:33: ranks must run the same operations in "
        "the same order"
    )


def test_a_rank_that_was_just_writing_has_no_other_operation():
    writing = rank(1, operation(1204, 1204, 41.0, checksum=0))
    assert diagnose(views(waiting(0), writing), limit_s=lambda _: 8.0).kind == "none"


def test_operations_of_different_steps_on_a_device():
    first, second = (operation(9, 9, 0.1, place="dp/native", checksum=each) for each in (5, 6))
    unknown = operation(9, 9, 0.1, place="dp/native", checksum=0)  # the rank was just writing
    assert mismatch(views(rank(0, first), rank(1, first), rank(2, unknown))) is None
    hang = mismatch(views(rank(0, first), rank(1, second)))
    assert "rank 1 in all_reduce 9 'blocks.7' of 10 float32 of another step" in hang.sentence()
    other_place = operation(9, 9, 0.1, place="ring", checksum=6)  # ranks there check themselves
    assert mismatch(views(rank(0, first), rank(1, other_place))) is None


def test_a_stopped_rank_although_its_operation_is_under_way():
    stopped = rank(1, operation(1204, 1204, 42.0), state="stopped")
    hang = diagnose(views(waiting(0), stopped), limit_s=lambda _: 8.0)
    assert hang.sentence().startswith("rank 1 on n0, pid 101, was stopped by a signal; ")
    assert "rank 0 waits for it" in hang.sentence()


def test_all_came_and_nothing_moves():
    hang = diagnose(views(waiting(0), waiting(1)), limit_s=lambda _: 8.0)
    assert hang.kind == "none"
    assert "nothing has moved for 42 s" in hang.sentence()


def test_the_line_of_the_script_is_that_of_the_main_thread():
    text = stack(31, "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py")
    assert script_site(text) == "train.py:31"
    assert len(main_thread(text)) == 4
    assert script_site("") == ""
