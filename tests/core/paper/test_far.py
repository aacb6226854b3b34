"""Approximate sums between hosts on paper: bytes of the method, in levels, and layouts."""

import pytest

from drivetrain.errors import ConfigError
from drivetrain.hardware.catalog import load_hardware
from drivetrain.paper.data_parallel import Sharing, data_parallel_step
from drivetrain.paper.far import FarMethod
from drivetrain.paper.run import PaperRun
from drivetrain.paper.transformer import GptShape
from drivetrain.planner.far import far_method
from drivetrain.planner.layout import read_layout
from drivetrain.planner.predict import Predictor, Task
from drivetrain.planner.run_file import run_settings

SHAPE = GptShape(layers=2, hidden=1024, heads=16, seq=128, vocab=512)
UNITS = SHAPE.units(1, "none", fused=True)
QUARTER = FarMethod("quarter", sent=0.25, sent_divided=0.125, held=1.0)


@pytest.mark.parametrize(("divided", "far"), [(False, 0.25), (True, 0.125)])
def test_hosts_sum_exactly_and_exchange_what_the_method_sends(divided, far):
    run = PaperRun({"dp": 8}, 1, "bf16", per_host=4, far=QUARTER)
    step = data_parallel_step(UNITS, run, Sharing(optimizer=divided))
    exact = 4 * SHAPE.parameters  # gradients are summed in fp32
    sent = step.sent()[0]
    assert sent["dp.near", "reduce_scatter"] == pytest.approx(exact * 3 / 4)
    assert sent["dp.far", "all_to_all"] == pytest.approx(exact / 4 * far)
    assert sent.get(("dp.near", "all_gather"), 0) == pytest.approx(0 if divided else exact * 3 / 4)
    assert step.held[0]["errors of links"] == pytest.approx(exact / 4)


def test_nothing_is_approximate_on_one_host():
    run = PaperRun({"dp": 4}, 1, "bf16", per_host=4, far=QUARTER)
    step = data_parallel_step(UNITS, run)
    assert set(step.sent()[0]) == {("dp", "all_reduce")}
    assert far_method("int8", 1) is None
    assert far_method("exact", 4) is None


def test_the_bytes_are_those_of_the_method():
    """docs/slow-links.md: (H-1)/H of n + 4n/256 bytes of n numbers, there and back; 4n are kept."""
    found = far_method("int8", 4)
    each = (1 + 4 / 256) / 4 * 3 / 4
    assert found.sent == pytest.approx(2 * each, rel=1e-3)
    assert found.sent_divided == pytest.approx(each, rel=1e-3)
    assert 1 <= found.held < 1.5


def test_a_slow_link_is_quicker_with_fewer_bytes():
    hardware = load_hardware("a100-80gb")
    between = hardware.links.between.model_copy(update={"gigabytes_per_second": 0.1})
    links = hardware.links.model_copy(update={"between": between})
    task = Task(SHAPE, 16, hardware.model_copy(update={"links": links}), 2, 8)
    predictor = Predictor(task)
    exact, int8, powersgd = (
        predictor.predict(read_layout(f"data_parallel=ddp,links={name}"))
        for name in ("exact", "int8", "powersgd")
    )
    assert exact.step_seconds > 1.5 * int8.step_seconds > powersgd.step_seconds
    assert run_settings(int8.planned, 1)["links"] == {"far": {"gradients": "int8"}}
    assert "links" not in run_settings(exact.planned, 1)
    bound = predictor.bound(int8.planned)
    assert bound.seconds <= int8.step_seconds * (1 + 1e-9)
    cell = predictor.predict(read_layout("tp=2,links=int8"))
    assert ("dp.far", "all_to_all") in cell.sent


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("links=int9", "int9"),
        ("links=int8,precision=fp16", "precision: bf16 or no with links.far.gradients"),
    ],
)
def test_a_method_that_cannot_be_is_refused(layout, expected):
    with pytest.raises(ConfigError, match=expected):
        read_layout(layout)
