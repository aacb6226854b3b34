"""A console that is gone: the run goes on, and nobody waits for its lines."""

import os
from pathlib import Path

import pytest

from drivetrain_launch.console import show, show_table


def test_a_console_without_a_reader_is_silent_from_then_on():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as console:
        for number in range(3):
            show(f"line {number}", console)
        console.write("a line of somebody else")  # and no error when the file is closed
    with pytest.raises(BrokenPipeError):  # the same without the silence
        broken = os.pipe()
        os.close(broken[0])
        os.write(broken[1], b"a line")
    os.close(broken[1])


def test_a_line_that_does_not_fit_on_the_disk_is_lost_and_the_next_one_tried():
    console = Path("/dev/full").open("w")  # noqa: SIM115 - its end fails, too
    show("a line", console)
    place = Path(f"/proc/self/fd/{console.fileno()}")
    assert str(place.readlink()) == "/dev/full"
    with pytest.raises(OSError, match="No space left"):
        console.close()


def test_a_table_has_the_width_of_the_terminal_and_no_word_is_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "38")
    show_table(
        "title", ("layout", "time", "note"),
        [("dp=2,tp=2", "12 ms", "one of two, by a mean")], folds=True,
    )  # fmt: skip
    assert capsys.readouterr().out == (
        "title\n"
        "  layout     time   note\n"
        "  dp=2,tp=2  12 ms  one of two, by a\n"
        "                    mean\n\n"
    )
    monkeypatch.setenv("COLUMNS", "20")
    show_table("", ("layout", "time"), [("dp=2,tp=2,pp=20000000000", "1,234 s")], folds=True)
    assert capsys.readouterr().out.splitlines()[2:-1] == [
        "  dp=2,tp=2,      1,234 s",
        "  pp=20000000000",
    ]
