"""Progress bars: on the main process only, with tqdm when there is tqdm, and without."""

import io
import sys
import types

import pytest
import torch.distributed as dist
from rich.console import Console

from drivetrain import log as bars
from drivetrain.log import progress, tqdm


def shown(monkeypatch, **options):
    """Return what a console of these options is sent from now on."""
    text = io.StringIO()
    console = Console(file=text, color_system=None, **options)
    monkeypatch.setattr(bars, "_console", lambda: console)
    return text


@pytest.fixture
def screen(monkeypatch):
    return shown(monkeypatch, force_terminal=True, width=100)


def test_disabled_bars_are_silent_and_markup_is_only_text(screen):
    assert list(progress(iter([1, 2]), disable=True)) == [1, 2]
    assert screen.getvalue() == ""

    assert list(progress([1], desc="[/red] file[0]")) == [1]
    assert "[/red] file[0]" in screen.getvalue()

    bar = progress(range(100), desc="left")
    with pytest.raises(ZeroDivisionError):
        for number in bar:
            1 / (3 - number)
    assert bar.n == 3
    assert "\x1b[?25h" in screen.getvalue(), "the cursor is back"


def test_tqdm_by_hand(screen, capsys, monkeypatch):
    monkeypatch.setattr("drivetrain.log.is_tqdm_available", lambda: False)
    with tqdm(total=10, desc="by hand", leave=False) as bar:
        bar.update(4)
        bar.set_postfix(loss=0.123456, lr="1e-4")
        bar.set_description("renamed")
        bar.write("a line")
    assert (bar.n, len(bar)) == (4, 10)
    for text in ("renamed", "loss=0.1235, lr=1e-4", "4/10"):
        assert text in screen.getvalue()
    assert capsys.readouterr().out == "a line\n"
    assert list(tqdm(range(2), "described", 2)) == [0, 1]
    assert "described" in screen.getvalue()


def test_long_texts_leave_bar_count_and_rate_alone(monkeypatch):
    text = shown(monkeypatch, force_terminal=True, width=80)
    with progress([], total=900, desc="a long description of the training") as bar:
        bar.update(450)
        bar.set_postfix(loss=0.03226, lr=0.001, grad_norm=12.35, tokens_per_second=1234567)
    last = next(line for line in reversed(text.getvalue().splitlines()) if "/900" in line)
    shown_line = last.rpartition("\x1b[2K")[2]
    assert shown_line.startswith("a long")
    assert len(shown_line) <= 80
    assert "loss=0.03226" in last
    assert "450/900" in last
    assert "it/s" in last
    assert "tokens_per_second" not in last


def test_a_file_gets_a_line_at_times_and_one_at_the_end(monkeypatch, capsys):
    shown(monkeypatch, force_terminal=False)
    clock = [0.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: clock[0])
    for _ in progress(range(8), desc="epoch 0"):
        clock[0] += 10.0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "epoch 0: 3/8, 10 s/it, 0:00:30 of 0:01:20",
        "epoch 0: 6/8, 10 s/it, 0:01:00 of 0:01:20",
        "epoch 0: 8/8, 10 s/it, 0:01:20",
    ]
    with bars.Bar(total=10, every=3) as bar:
        for count in (2, 2, 1, 2):
            bar.update(count)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["4/10", "7/10"]


def test_real_tqdm_is_used_when_installed(monkeypatch):
    auto = types.ModuleType("tqdm.auto")
    auto.tqdm = lambda *args, **kwargs: (args, kwargs)
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", auto)
    assert tqdm([1], "text", leave=False) == (([1], "text"), {"leave": False, "disable": False})
    assert tqdm([1], disable=True) == (([1],), {"disable": True})


@pytest.mark.ranks(2)
def test_only_the_main_process_shows_bars():
    assert progress([1]).disable == (dist.get_rank() != 0)
    assert list(progress([1, 2], disable=True)) == [1, 2]
