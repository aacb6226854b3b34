"""Records put together: restarts, torn files, means over ranks, shares of a step."""

import math

import numpy as np
import pytest

from drivetrain.hardware.sizes import size_text
from drivetrain.observe import history as measures
from drivetrain.observe.figures import Journal
from drivetrain.observe.history import (
    differences,
    in_seconds,
    in_short,
    load_history,
    summary_of,
)
from recorded_runs import FACTS, step, write_run


def numbers(run):
    return {number.name: number.value for number in summary_of(run)}


def notes(run):
    return {number.name: number.note for number in summary_of(run)}


def test_values_are_means_and_counts_are_sums_over_ranks(tmp_path):
    write_run(tmp_path, range(1, 6))
    run = load_history(tmp_path)
    loss = measures.mean_curve(run, lambda each: each.loss)
    assert loss.steps.tolist() == [1, 2, 3, 4, 5]
    assert loss.values.tolist() == pytest.approx([8.5, 4.5, 8 / 3 + 0.5, 2.5, 2.1])
    assert measures.middle(measures.rate_curve(run, lambda each: each.samples)) == 80
    assert measures.bytes_per_step(run) == {"dp/all_reduce": 4000}
    assert measures.promised_bytes(run) == {"dp/all_reduce": 4000}
    found = measures.breakdown(run)
    assert found[0]["waiting dp"] == pytest.approx(0.04)
    assert found[1]["backward"] == pytest.approx(0.07)
    assert numbers(run)["waiting"] == "20%"
    assert "rank 1 waits least" in notes(run)["waiting"]
    assert numbers(run)["stragglers"] == "rank 1"
    said = notes(run)["stragglers"]
    assert "slower than the others: 100 ms of work in a step against 60 ms; most" in said
    assert said.endswith("in backward, 70 ms against 30 ms")

    wide = {"configuration": [{"key": "launch.straggler_margin", "value": 1.0}]}
    write_run((tmp_path / "1"), range(1, 6), facts=wide | {"mesh": {"tp": 2, "dp": 1}})
    run = load_history(tmp_path / "1")
    assert "stragglers" not in numbers(run)
    assert measures.middle(measures.rate_curve(run, lambda each: each.tokens)) == 640

    sections = {"forward": 0.05, "evaluation": 0.03, "checkpoint": 0.02}
    write_run((tmp_path / "2"), range(1, 6), sections=sections, waiting={})
    assert measures.step_seconds(load_history(tmp_path / "2")) == pytest.approx(0.05)

    write_run((tmp_path / "4"), range(1, 6), sections={"forward": 1.0})
    assert notes(load_history(tmp_path / "4"))["waiting"] == "of the time of all ranks"

    write_run((tmp_path / "3"), range(2, 11, 2), steps=2, skipped=1)  # records of two steps
    run = load_history(tmp_path / "3")
    assert (run.starts[0].first, run.starts[0].last) == (1, 10)
    assert measures.step_seconds(run) == pytest.approx(0.05)
    assert numbers(run)["sent in a step"] == size_text(2000)
    assert numbers(run)["skipped steps"] == "5"
    assert measures.steady([1, 2, 3]) == [2, 3], "the first one makes buffers"


def test_a_restart_goes_on_and_repeats_steps(tmp_path):
    write_run(tmp_path, range(1, 11), end="")
    write_run(tmp_path, range(9, 16), events=["resumed"])
    run = load_history(tmp_path)
    assert [each.step for each in run.main] == list(range(1, 16))
    assert (run.repeated, run.restarts) == (2, [9])
    assert numbers(run)["steps"] == "15"
    assert notes(run)["steps"] == "1 restart, 2 steps taken again"
    assert [start.good for start in run.starts] == [False, True]
    assert "was killed" in run.starts[0].outcome
    assert run.starts[1].resumed == "saved"


def test_starts_again_and_restarts_are_told_apart(tmp_path):
    first = write_run(tmp_path, range(1, 11))
    write_run(tmp_path, range(1, 4))
    run = load_history(tmp_path)
    assert [each.step for each in run.main] == [1, 2, 3]
    assert any("1 earlier start" in remark for remark in run.remarks)
    assert len(load_history(first.path).main) == 10

    write_run((tmp_path / "2"), range(1, 4))  # steps of 0.1 s
    write_run((tmp_path / "2"), range(101, 104), events=["resumed"])
    run = load_history(tmp_path / "2")
    assert numbers(run)["duration"] == "600 ms"
    assert notes(run)["duration"].endswith("UTC; 9.7 s between starts not counted")

    write_run((tmp_path / "1"), range(1, 4), end="failed")
    write_run((tmp_path / "1"), range(1, 6), facts={"restarts": 1})
    run = load_history(tmp_path / "1")
    assert len(run.main) == 5
    assert run.repeated == 3
    assert run.starts[0].outcome == "failed: no reason given"


def test_empty_runs_missing_ranks_and_infinite_losses_say_so(tmp_path):
    write_run(tmp_path, [], end="")
    run = load_history(tmp_path)
    assert numbers(run) == {"steps": "0"}
    assert "no step has been recorded yet" in run.remarks

    write_run((tmp_path / "1"), range(1, 4), ranks=1)
    assert any("no records of rank 1" in remark for remark in load_history(tmp_path / "1").remarks)

    start = write_run((tmp_path / "2"), [], ranks=0)
    journal = Journal(start.journal(0), {"rank": 0})
    for number, loss in enumerate((2.0, math.nan, 4.0), 1):
        journal.add(step(number, loss=loss))
    journal.close()
    run = load_history(tmp_path / "2")
    assert numbers(run)["losses not finite"] == "1"
    smooth = measures.mean_curve(run, lambda each: each.loss)
    assert np.isnan(smooth.values).tolist() == [False, True, False]


def test_a_rank_counts_in_means_as_far_as_its_records_go(tmp_path):
    start = write_run(tmp_path, range(1, 4), ranks=1)
    journal = Journal(start.journal(1), {"rank": 1})
    journal.add(step(1, 1))
    journal.close()
    loss = measures.mean_curve(load_history(tmp_path), lambda each: each.loss)
    assert loss.values.tolist() == pytest.approx([8.5, 4, 8 / 3])


def test_a_torn_run_shows_what_is_there(tmp_path):
    start = write_run(tmp_path, range(1, 6), ranks=1, end="")
    path = start.journal(0)
    path.write_text(path.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    (start.path / "run.json").write_text('{"ranks":', encoding="utf-8")
    run = load_history(tmp_path)
    assert [each.step for each in run.main] == [1, 2, 3, 4]
    assert any("run.json is missing or torn" in remark for remark in run.remarks)
    assert any("1 torn line of rank 0" in remark for remark in run.remarks)
    assert measures.promised_bytes(run) is None
    assert numbers(run)["steps"] == "4"


def test_utilization_names_formula_and_peak(tmp_path):
    peak = {"device": "NVIDIA H100", "operations_per_second": 1e7, "of": "bf16"}
    peak |= {"source": "a data sheet"}
    model = FACTS["models"][0] | {"trained": 500}
    write_run(tmp_path, range(1, 6), facts={"peak": peak, "models": [model]})
    run = load_history(tmp_path)
    # 4 x 1000 + 2 x 500 operations a token, 1280 tokens a second, 2 ranks of 1e7
    assert numbers(run)["MFU"] == "32.0%"
    assert "4 N + 2 trained N" in notes(run)["MFU"]
    assert "peak of NVIDIA H100 in bf16: 10 M a second (a data sheet)" in notes(run)["MFU"]
    write_run(tmp_path / "two", range(1, 6), facts={"peak": peak, "models": [model] * 2})
    run = load_history(tmp_path / "two")
    assert numbers(run)["MFU"] == "64.0%"
    assert measures.promised_bytes(run) == {"dp/all_reduce": 8000}
    write_run(tmp_path / "cpu", range(1, 6))
    without = load_history(tmp_path / "cpu")
    assert "MFU" not in numbers(without)
    assert "no published peak is known for CPU" in notes(without)["FLOP/s"]


def test_differences_leave_out_options_of_one_strategy(tmp_path):
    other = [
        {"key": "strategy.name", "value": "zero1", "origin": "file: run.yaml:1"},
        {"key": "strategy.partition", "value": "flat", "origin": "default"},
        {"key": "seed", "value": 3, "origin": "command line: --seed 3"},
    ]
    write_run(tmp_path / "a", range(1, 3), facts={"started": {"command": "train.py --lr 1"}})
    facts = {"configuration": other, "strategy": "zero1", "started": {"command": "train.py"}}
    write_run(tmp_path / "b", range(1, 3), facts=facts)
    runs = [load_history(tmp_path / name) for name in "ab"]
    assert differences(runs) == [
        ("command", ["train.py --lr 1", "train.py"]),
        ("strategy.name", ["ddp", "zero1"]),
        ("seed", ["not set", "3"]),
    ]
    assert differences([runs[0], runs[0]]) == []


def test_curves_and_numbers_are_as_people_write_them():
    line = measures.Curve(np.arange(75.0), 2 * np.arange(75.0))
    assert line.smooth().values[1:-1].tolist() == pytest.approx(line.values[1:-1].tolist())
    assert measures.middle(measures.Curve(np.arange(4.0), np.array([9.0, 1.0, 8.0, 2.0]))) == 2

    assert [in_short(each) for each in (9_999, 12_345, 4.5e6)] == ["9999", "12.3 k", "4.5 M"]
    assert [size_text(each) for each in (1023, 1536, 3 << 40)] == ["1023 B", "1.5 KiB", "3.0 TiB"]
    texts = ["200 us", "119 s", "4 min 10 s", "2 h 05 min"]
    assert [in_seconds(each) for each in (2e-4, 119, 249.6, 7500)] == texts


def test_the_memory_of_a_summary_is_the_most_of_any_rank(tmp_path):
    gib = 1 << 30
    memory = {"resident": 2 * gib, "device": gib, "device_peak": 3 * gib}
    write_run(tmp_path, range(1, 4), memory=memory)
    found = numbers(load_history(tmp_path))
    assert (found["memory"], found["device memory"]) == ("2.0 GiB", "3.0 GiB")
