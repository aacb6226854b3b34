"""What a rank shows on its board, and a launcher reads there."""

import os
import signal
import time

from drivetrain.runtime import board as boards
from drivetrain.runtime.board import ROWS, SIZE, Board, ask_to_stop, read_board


def attached(tmp_path):
    path = tmp_path / "rank-0.board"
    board = Board()
    board.attach(path)
    return board, path


def test_a_launcher_reads_what_a_rank_shows(tmp_path):
    assert read_board(bytes(SIZE), 0.0) is None, "nobody has written"
    board, path = attached(tmp_path)
    line = board.open("group 7/2", [1, 3, 5])
    before = time.monotonic()
    board.enter("backward")
    line.submit(9)
    line.begin(8, 77, "all_reduce", 100, "float32", "gradients of " + "x" * 99 + ".last")
    view = read_board(path.read_bytes(), time.monotonic())
    assert view.section == "backward"
    (shown,) = view.rows
    assert (shown.place, shown.ranks) == ("group 7/2", [1, 3, 5])
    assert (shown.submitted, shown.running, shown.checksum) == (9, 8, 77)
    assert shown.size == "100 float32"
    assert shown.name.startswith("all_reduce 8 '")
    assert shown.name.endswith("x.last'")
    assert 0 <= shown.running_s <= time.monotonic() - before
    line.end()
    assert read_board(path.read_bytes(), 0.0).rows[0].running == 0
    line.begin(9, 0, "", 0, "", "/home/me/train.py:12")
    (shown,) = read_board(path.read_bytes(), 0.0).rows
    assert (shown.name, shown.size) == ("train.py:12", ""), "a line of the script"
    line.close()
    assert read_board(path.read_bytes(), 0.0).rows == []


def test_a_full_board_shows_the_first_orders_and_takes_new_ones_later(tmp_path):
    board, path = attached(tmp_path)
    lines = [board.open(f"group {index}", [0, 1]) for index in range(ROWS + 2)]
    assert len(read_board(path.read_bytes(), 0.0).rows) == ROWS
    lines[3].close()
    lines[3].close()
    board.open("late", [0, 2, 3])  # unevenly spaced: all ranks may take part
    board.open("too late", [0, 1])
    late = next(line for line in read_board(path.read_bytes(), 0.0).rows if line.place == "late")
    assert late.ranks == []


def test_a_launcher_that_ends_a_rank_gives_no_notice(tmp_path, monkeypatch):
    board, path = attached(tmp_path)
    killed = []
    monkeypatch.setattr(boards, "board", board)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        for heard, dies in (("SIGTERM", []), ("", [(os.getpid(), signal.SIGTERM)])):
            notice = boards.Notice()
            notice.listen()
            signal.raise_signal(signal.SIGTERM)
            assert (notice.heard, killed) == (heard, dies)
            notice.close()
            ask_to_stop(path)
    finally:
        signal.signal(signal.SIGTERM, before)
