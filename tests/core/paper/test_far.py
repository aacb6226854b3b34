"""Approximate sums between hosts on paper: bytes of the method, in levels, and layouts."""

from dataclasses import replace

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


def test_a_pipeline_over_hosts_sends_rounded_activations_in_half_the_bytes():
    """Four stages on two hosts: the link in the middle alone is between hosts."""
    hardware = load_hardware("a100-80gb")
    between = hardware.links.between.model_copy(update={"gigabytes_per_second": 0.01})
    links = hardware.links.model_copy(update={"between": between})
    shape = GptShape(layers=4, hidden=1024, heads=16, seq=128, vocab=512, tied=False)
    task = Task(shape, 8, hardware.model_copy(update={"links": links}), 2, 2)
    predictor = Predictor(task)

    def predicted(name, precision):
        layout = f"pp=4,data_parallel=ddp,activations={name},precision={precision}"
        planned = read_layout(layout)
        step = predictor.step(planned, *predictor.divisions(planned))
        return predictor.predict(planned), [sent["pp", "send"] for sent in step.sent()]

    (exact, whole), (rounded, half) = (predicted(name, "no") for name in ("exact", "bf16"))
    one_way = 8 * 128 * 1024 * 4
    assert whole == [one_way, 2 * one_way, 2 * one_way, one_way]
    assert half == [one_way, 1.5 * one_way, 1.5 * one_way, one_way]
    assert exact.step_seconds > 1.1 * rounded.step_seconds
    assert run_settings(rounded.planned, 8)["links"] == {"far": {"activations": "bf16"}}
    assert predictor.bound(rounded.planned).seconds <= rounded.step_seconds * (1 + 1e-9)
    (_, whole), (_, half) = (predicted(name, "bf16") for name in ("exact", "bf16"))
    assert whole == half, "two bytes already"


def test_a_pipeline_exchanges_values_and_gradients_of_tied_copies():
    def sent(tied):
        shape = GptShape(layers=4, hidden=1024, heads=16, seq=128, vocab=512, tied=tied)
        predictor = Predictor(Task(shape, 8, load_hardware("a100-80gb"), 1, 2))
        planned = read_layout("pp=2,data_parallel=ddp,precision=no")
        step = predictor.step(planned, *predictor.divisions(planned))
        return [each["pp", "send"] for each in step.sent()]

    copy = 512 * 1024 * 4
    assert [more - less for more, less in zip(sent(True), sent(False), strict=True)] == [copy, copy]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("pp=2,activations=int8", "expected activations of exact, bf16, found 'int8'"),
        ("data_parallel=ddp,activations=bf16", "sends no activations"),
        ("tp=2,activations=bf16", "exact without a pipeline"),
    ],
)
def test_activations_that_cannot_be_rounded_are_refused(layout, expected):
    with pytest.raises(ConfigError, match=expected):
        read_layout(layout)


@pytest.mark.parametrize("per_host", [1, 4, 8])
def test_secondary_shards_are_gathered_inside_of_hosts_and_refreshed_between_them(per_host):
    run = PaperRun({"dp": 8}, 1, "bf16", per_host=per_host)
    divided = Sharing(optimizer=True, gradients=True, parameters=True)
    before = data_parallel_step(UNITS, run, divided)
    step = data_parallel_step(UNITS, run, replace(divided, secondary=True))
    sent, hosts = step.sent()[0], 8 // per_host
    values = run.bytes.parameter * SHAPE.parameters
    if hosts == 1:
        assert sent == before.sent()[0]
        assert step.held == before.held
        return
    assert ("dp", "all_gather") not in sent
    assert sent["dp.far", "all_gather"] == pytest.approx(values / per_host * (hosts - 1) / hosts)
    inside = (per_host - 1) / per_host / (7 / 8) * before.sent()[0]["dp", "all_gather"]
    assert sent.get(("dp.near", "all_gather"), 0) == pytest.approx(inside)
    more = step.held[0]["parameters"] - before.held[0]["parameters"]
    assert more == pytest.approx(values / per_host)
