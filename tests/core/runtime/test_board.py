"""What a rank shows on its board, and a launcher reads there."""

import os
import signal
import subprocess
import sys
import time

from drivetrain.runtime.board import ROWS, SIZE, Board, ask_to_stop, read_board


def attached(tmp_path):
    path = tmp_path / "rank-0.board"
    board = Board()
    board.attach(path)
    return board, path


def test_a_launcher_reads_what_a_rank_shows(tmp_path):
    board, path = attached(tmp_path)
    line = board.open("group 7/2", [1, 3, 5])
    before = time.monotonic()
    board.enter("backward")
    line.submit(9)
    line.begin(8, 77, "all_reduce", 100, "float32", "gradients of " + "x" * 99 + ".last")
    view = read_board(path.read_bytes())
    assert view.section == "backward"
    (shown,) = view.rows
    assert (shown.place, shown.ranks) == ("group 7/2", [1, 3, 5])
    assert (shown.submitted, shown.running, shown.checksum) == (9, 8, 77)
    assert (shown.operation, shown.elements, shown.dtype) == ("all_reduce", 100, "float32")
    assert shown.label.endswith("x.last")
    assert before <= shown.since <= time.monotonic()
    line.end()
    assert read_board(path.read_bytes()).rows[0].running == 0
    line.close()
    assert read_board(path.read_bytes()).rows == []


def test_a_file_that_nobody_has_written_is_no_board(tmp_path):
    assert read_board(bytes(SIZE)) is None


def test_a_full_board_shows_the_first_orders_and_takes_new_ones_later(tmp_path):
    board, path = attached(tmp_path)
    lines = [board.open(f"group {index}", [0, 1]) for index in range(ROWS + 2)]
    assert len(read_board(path.read_bytes()).rows) == ROWS
    lines[3].close()
    lines[3].close()
    board.open("late", [0, 2, 3])  # unevenly spaced: all ranks may take part
    board.open("too late", [0, 1])
    late = next(line for line in read_board(path.read_bytes()).rows if line.place == "late")
    assert late.ranks == []


LISTENER = """
import sys, time
from drivetrain.runtime.board import board
from drivetrain.runtime.notices import Notice
board.attach(sys.argv[1])
notice = Notice()
notice.listen()
print("listening", flush=True)
while not notice.heard:
    time.sleep(0.01)
print("heard", flush=True)
"""


def signalled(path, *, stop: bool) -> tuple[str, int]:
    words = [sys.executable, "-c", LISTENER, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "listening\n"
        if stop:
            ask_to_stop(path)
        os.kill(process.pid, signal.SIGTERM)
        rest = process.stdout.read()
        return rest, process.wait()


def test_a_launcher_that_ends_a_rank_gives_no_notice(tmp_path):
    assert signalled(tmp_path / "a", stop=False) == ("heard\n", 0)
    assert signalled(tmp_path / "b", stop=True) == ("", -signal.SIGTERM)
