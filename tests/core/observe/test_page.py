"""The page of a report: whole in one file, for runs of every kind, also in a browser."""

import inspect
import json
import logging
import re
import shutil
import subprocess
import sys

import pytest
import torch
from PIL import Image

from drivetrain import Accelerator
from drivetrain.observe.charts import Chart, charts_of
from drivetrain.observe.history import load_history
from drivetrain.observe.page import write_report
from recorded_runs import FACTS, write_run

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
NO_PAGE = "not an origin"
"""The initiator of a request that the browser sends of its own accord, in its log."""

CHARTS = ("bytes", "gradient-norm", "loss", "memory", "step-time", "throughput", "time-of-a-step")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """The pages of one run, and of two."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a", range(1, 90), own={"accuracy": 0.5}, end="")
    model = FACTS["models"][0] | {"sent": {"dp/all_reduce": 4000, "dp/broadcast": 512}}
    write_run(folder / "a", range(80, 120), events=["resumed"], own={"accuracy": 0.6}, skipped=1,
              facts={"models": [model]})  # fmt: skip
    write_run(folder / "b", range(1, 60))
    runs = [load_history(folder / name) for name in "ab"]
    return write_report(runs[:1], runs[0].folder), write_report(runs, folder / "both")


def external(page):
    """Return what a page would fetch: addresses, and files besides fragments of itself."""
    found = re.findall(r"""(?:src|href|action|data)\s*=\s*["']?([^"'\s>]+)""", page)
    found += re.findall(r"url\(([^)]*)\)", page) + re.findall(r"@import[^;]*", page)
    return [each for each in found if not each.startswith(("#", "data:,"))]


def test_a_page_refers_to_nothing_and_has_all_charts(comparison):
    one, both = comparison
    for path in (one, both):
        page = path.read_text(encoding="utf-8")
        assert external(page) == []
        assert "<script" not in page
        names = re.findall(r'<section id="([\w-]+)"', page)
        assert sorted(names) == sorted([*CHARTS, "own-figures"])
        assert page.count("<svg") == len(names)
        identities = re.findall(r'\bid="([^"]+)"', page)
        assert len(identities) == len(set(identities))
        for name in names:
            with Image.open(path.parent / "figures" / f"{name}.png") as picture:
                assert picture.width > 1000
    assert external('<img src="http://a/b.png"><a href="b.css">') == ["http://a/b.png", "b.css"]


def test_the_page_tells_the_run(comparison):
    page = comparison[0].read_text(encoding="utf-8")
    for text in (
        "train.py under ddp on 2 ranks",
        "GPT of 1,000 parameters",
        "1 restart, 10 steps taken again",
        "no end is recorded",
        "skipped steps",
        "promised: 4.4 KiB",
        '<td class="number">0 B</td><td class="number">512 B</td>',  # promised, and not sent
        "<code>strategy.name</code>",
        "accuracy",
    ):
        assert text in page
    both = comparison[1].read_text(encoding="utf-8")
    assert "None: commands, configurations and environments are the same" in both


def drawn(folder):
    return {chart.name: chart.figure.axes[0] for chart in charts_of([load_history(folder)])}


def test_charts_show_the_figures_of_the_records(tmp_path):
    facts = {"models": [FACTS["models"][0] | {"sent": {"dp/all_reduce": 8000}}]}
    write_run(tmp_path, (1, 601), ranks=26, end="", facts=facts)
    write_run(tmp_path, (1201,), ranks=26, events=["resumed"], skipped=1, facts=facts)
    axes = drawn(tmp_path)
    memory = axes["memory"].get_lines()
    assert [each.get_label() for each in memory] == ["rank 0", "rank 13", "rank 25"]
    assert memory[0].get_xdata().tolist() == pytest.approx([0, 1, 2])  # minutes
    assert memory[0].get_ydata().tolist() == [2, 2, 2]  # GiB
    bars = axes["time-of-a-step"]
    assert bars.get_yticklabels()[0].get_text() == "rank 0"  # it alone waits
    parts = [each[0] for each in bars.containers]
    assert [each.get_x() for each in parts] == pytest.approx([0, 10, 30, 60])
    assert [each.get_width() for each in parts] == pytest.approx([10, 20, 30, 40])
    norm, restart, skipped = axes["gradient-norm"].get_lines()
    assert len(norm.get_xdata()) == 3
    assert (restart.get_xdata()[0], skipped.get_xdata().tolist()) == (1201, [1201])
    assert axes["gradient-norm"].get_yscale() == "linear"
    sent = {each.get_label(): each[0].get_width() for each in axes["bytes"].containers}
    assert sent == {"sent": 4000, "promised": 8000}

    write_run(tmp_path / "2", (2, 4), steps=2)
    assert drawn(tmp_path / "2")["step-time"].get_lines()[0].get_ydata().tolist() == [0.05, 0.05]


def test_of_several_runs_the_rank_with_the_most_memory_is_drawn(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, range(1, 4))  # rank 1 has more than rank 0
    (memory,) = [
        chart
        for chart in charts_of([load_history(tmp_path / name) for name in "ab"])
        if chart.name == "memory"
    ]
    labels = memory.figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["a, rank 1", "b, rank 1"]


@pytest.fixture
def no_pictures(monkeypatch):
    """Leave out the files beside a page."""
    monkeypatch.setattr(Chart, "save", lambda chart, folder: folder / f"{chart.name}.png")


@pytest.mark.usefixtures("no_pictures")
def test_texts_of_a_run_are_no_markup(tmp_path):
    write_run(tmp_path / "<b>x", range(1, 4), facts={"script": "<script>alert(1)</script>"})
    run = load_history(tmp_path / "<b>x")
    page = write_report([run], run.folder).read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "<b>x" not in page


@pytest.mark.usefixtures("no_pictures")
def test_runs_of_which_little_is_known_have_a_page(tmp_path):
    unknown = {"loss": None, "lr": None, "grad_norm": None, "samples": 0, "tokens": 0}
    for kind, steps, values, expected in (
        ("empty", [], {}, "no step has been recorded yet"),
        ("torn", range(1, 5), {}, "1 torn line of rank 1 left out"),
        ("one step", [1], {}, 'id="loss"'),
        ("no loss", range(1, 5), unknown, 'id="time-of-a-step"'),
    ):
        start = write_run(tmp_path / kind, steps, end="", **values)
        if kind == "torn":
            (start.path / "run.json").unlink()
            start.journal(1).write_bytes(b'{"rank": 1}\n{"step": 1, "lo')
        run = load_history(tmp_path / kind)
        page = write_report([run], run.folder).read_text(encoding="utf-8")
        assert expected in page, kind


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_the_page_and_sends_no_request(comparison, tmp_path):
    def visit(page, *options):
        log = tmp_path / "net.json"
        done = subprocess.run(
            [
                BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1120,3600",
                "--disable-background-networking", "--disable-component-update",
                f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", *options,
                page.as_uri(),
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        events = json.loads(log.read_text(encoding="utf-8"))["events"]
        # A browser has services of its own, whose requests have no page as their initiator.
        requests = [event["params"] for event in events if "initiator" in event.get("params", {})]
        urls = {each["url"] for each in requests if each["initiator"] != NO_PAGE}
        return done.stdout, {url for url in urls if url.startswith(("http:", "https:", "ws"))}

    for page in comparison:
        text, sent = visit(page, "--dump-dom")
        assert sent == set()
        assert text.count("<svg") == len(CHARTS) + 1
        shot = tmp_path / "shot.png"
        visit(page, f"--screenshot={shot}")
        with Image.open(shot) as picture:
            colors = picture.convert("RGB").getcolors(1 << 24)
        # Bars of waiting are red, and charts are more than a few flat fields.
        assert (229, 62, 62) in {color for count, color in colors if count > 1000}
        assert len(colors) > 200
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://127.0.0.1:9/x.png">', encoding="utf-8")
    assert visit(bad, "--dump-dom")[1] == {"http://127.0.0.1:9/x.png"}


def train(folder):
    accelerator = Accelerator(cpu=True, project_dir=folder)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    return accelerator


def test_without_the_extra_the_run_is_recorded_and_the_way_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with caplog.at_level(logging.INFO):
        train(tmp_path).end_training()
    said = caplog.text
    assert "found no jinja2; pip install 'drivetrain[report]'" in said
    assert f"drivetrain report {tmp_path}" in said
    assert not (tmp_path / "run" / "report.html").exists()
    assert len(load_history(tmp_path).main) == 3


@pytest.mark.exhaustive
def test_a_failed_script_leaves_a_report(tmp_path):
    script = tmp_path / "train.py"
    imports = "import sys, torch\nfrom drivetrain import Accelerator\n"
    end = "train(sys.argv[1])\nraise ValueError('a disk went away')\n"
    script.write_text(f"{imports}{inspect.getsource(train)}{end}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "report of the run" in done.stderr
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "failed: ValueError: a disk went away" in page
