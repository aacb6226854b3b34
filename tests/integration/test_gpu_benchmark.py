"""The program that measures on a GPU runs everywhere, with a tiny model."""

import json
from pathlib import Path

import gpu
import pytest

from drivetrain.hardware.description import load_hardware
from forked_programs import run_python

PROGRAM = Path(gpu.__file__)


def run(out, *arguments):
    return run_python(str(PROGRAM), "--out", str(out), *arguments, folder=out)


def results(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_case_is_measured_once_and_a_failed_one_again(tmp_path):
    measured = {"case": "B/zero3", "step_s": 1.0, "host_s": 0.5, "loss": 2.0}
    before = [measured, {"case": "K/fsdp", "error": "full"}]
    (tmp_path / "results.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in before))
    ran = run(tmp_path, "--only", "B/zero3,K/fsdp", "--resume")
    assert ran.returncode == 0, ran.stderr
    *kept, again = results(tmp_path)
    assert kept == before
    assert again["case"] == "K/fsdp"
    assert "error" not in again, again
    assert "collectives" in again
    assert again["promised_bytes"] > 0
    table = (tmp_path / "table.md").read_text()
    assert "| zero3 | 1000.00 |" in table
    assert "| fsdp |" in table


def test_a_case_that_fails_or_takes_too_long_costs_only_itself(tmp_path, monkeypatch):
    row = gpu.Row("X", gpu.TINY, ("bare", "no such system"))
    monkeypatch.setattr(gpu, "ROWS", (row,))
    late = gpu.Case(row, "bare", tmp_path)
    assert late.result(0.05) == {"error": "more than 0 s"}
    assert "expected rows or row/system" in gpu.Case(row, "bare", tmp_path).result(60)["error"]
    with pytest.raises(SystemExit, match="X/bare"):
        gpu.chosen("Y")


def test_operations_of_a_step():
    shape = gpu.Shape(layers=2, dim=4, inner=8, batch=3, seq=5, vocab=7, head=2)
    weights = 2 * (4 * 16 + 3 * 32) + 28
    assert shape.operations(causal=False) == 15 * (6 * weights + 12 * 2 * 4 * 5)
    assert shape.operations(causal=True) == 15 * (6 * weights + 6 * 2 * 4 * 5)


def test_communication_beside_compute():
    messages, compute = gpu.united([(5.0, 9.0), (0.0, 4.0), (3.0, 4.5)]), [(1.0, 2.0), (4.0, 6.0)]
    assert messages == [(0.0, 4.5), (5.0, 9.0)]
    assert gpu.overlap(messages, compute) == 2.5


def test_a_prediction_stands_over_what_was_measured():
    predicted = {"step_s": 0.11, "host_s": 0.0, "loss": 0.0, "peak_bytes": 0}
    measured = {"P/plan": predicted, "A/fsdp bf16": predicted | {"step_s": 0.1}}
    assert "| plan | 110.00 | 1.100 |" in gpu.table(measured)
    assert "| plan | 110.00 |  |" in gpu.table({"P/plan": predicted})


@pytest.mark.exhaustive
def test_a_plan_reads_the_description_that_was_measured(tmp_path):
    """On processors the same way as on a GPU, with a tiny model."""
    ran = run(tmp_path, "--only", "A/fsdp bf16,P/plan")
    assert ran.returncode == 0, ran.stderr
    measured, plan = results(tmp_path)
    assert "error" not in plan, plan
    described = tmp_path / "mine.yaml"
    described.write_text(plan["prices"])
    hardware = load_hardware(str(described))
    assert hardware.device.source.startswith("measured ")
    assert plan["step_s"] > 0
    ratio = plan["step_s"] / measured["step_s"]
    assert f"| plan | {1e3 * plan['step_s']:.2f} | {ratio:.3f} |" in (
        (tmp_path / "table.md").read_text()
    )


@pytest.mark.exhaustive
def test_every_case_runs(tmp_path):
    ran = run(tmp_path, "--minutes", "20")
    assert ran.returncode == 0, ran.stderr
    errors = {each["case"]: each["error"] for each in results(tmp_path) if "error" in each}
    failed = {case: error for case, error in errors.items() if "torchao" not in error}
    assert not failed
