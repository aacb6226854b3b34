"""Approximate sums between hosts on paper: bytes of the method, in levels, and layouts."""

from dataclasses import replace

import pytest

from drivetrain.errors import ConfigError
from drivetrain.hardware.description import load_hardware
from drivetrain.planner.layout import far_method, read_layout
from drivetrain.planner.search import Predictor, Task
from drivetrain.simulator.contract import Sharing, data_parallel_step
from drivetrain.simulator.step import FarMethod, SimulatedRun
from drivetrain.simulator.transformer import GptShape

SHAPE = GptShape(layers=2, hidden=1024, heads=16, seq=128, vocab=512)
UNITS = SHAPE.units(1, "none", fused=True)
QUARTER = FarMethod("quarter", sent=0.25, sent_divided=0.125, held=1.0)


def test_hosts_sum_exactly_and_exchange_what_the_method_sends():
    for divided, far in ((False, 0.25), (True, 0.125)):
        run = SimulatedRun({"dp": 8}, 1, "bf16", per_host=4, far=QUARTER)
        step = data_parallel_step(UNITS, run, Sharing(optimizer=divided))
        exact = 4 * SHAPE.parameters  # gradients are summed in fp32
        sent = step.sent()[0]
        assert sent["dp.near", "reduce_scatter"] == pytest.approx(exact * 3 / 4)
        assert sent["dp.far", "all_to_all"] == pytest.approx(exact / 4 * far)
        gathered = 0 if divided else exact * 3 / 4
        assert sent.get(("dp.near", "all_gather"), 0) == pytest.approx(gathered)
        assert step.held[0]["errors of links"] == pytest.approx(exact / 4)


def test_the_bytes_are_those_of_the_method_and_one_host_is_exact():
    run = SimulatedRun({"dp": 4}, 1, "bf16", per_host=4, far=QUARTER)
    step = data_parallel_step(UNITS, run)
    assert set(step.sent()[0]) == {("dp", "all_reduce")}
    assert far_method("int8", 1) is None
    assert far_method("exact", 4) is None

    # docs/slow-links.md: (H-1)/H of n + 4n/256 bytes of n numbers, there and back; 4n are kept.
    found = far_method("int8", 4)
    each = (1 + 4 / 256) / 4 * 3 / 4
    assert found.sent == pytest.approx(2 * each, rel=1e-3)
    assert found.sent_divided == pytest.approx(each, rel=1e-3)
    assert 1 <= found.held < 1.5


def test_layouts_that_cannot_be_are_refused():
    for layout, expected in (
        ("links=int9", "int9"),
        ("links=int8,precision=fp16", "precision: bf16 or no with links.far.gradients"),
        ("pp=2,activations=int8", "expected activations of exact, bf16, found 'int8'"),
        ("data_parallel=ddp,activations=bf16", "sends no activations"),
        ("tp=2,activations=bf16", "exact without a pipeline"),
    ):
        with pytest.raises(ConfigError, match=expected):
            read_layout(layout)


def test_a_pipeline_sends_rounded_activations_and_tied_copies():
    # Four stages on two hosts: the link in the middle alone is between hosts.
    shape = GptShape(layers=4, hidden=1024, heads=16, seq=128, vocab=512, tied=False)
    predictor = Predictor(Task(shape, 8, load_hardware("a100-80gb"), 2, 2))

    def sent(name, precision):
        layout = f"pp=4,data_parallel=ddp,activations={name},precision={precision}"
        planned = read_layout(layout)
        step = predictor.step(planned, *predictor.divisions(planned))
        return [each["pp", "send"] for each in step.sent()]

    whole, half = sent("exact", "no"), sent("bf16", "no")
    one_way = 8 * 128 * 1024 * 4
    assert whole == [one_way, 2 * one_way, 2 * one_way, one_way]
    assert half == [one_way, 1.5 * one_way, 1.5 * one_way, one_way]
    assert sent("exact", "bf16") == sent("bf16", "bf16"), "two bytes already"

    def sent(tied):
        shape = GptShape(layers=4, hidden=1024, heads=16, seq=128, vocab=512, tied=tied)
        predictor = Predictor(Task(shape, 8, load_hardware("a100-80gb"), 1, 2))
        planned = read_layout("pp=2,data_parallel=ddp,precision=no")
        step = predictor.step(planned, *predictor.divisions(planned))
        return [each["pp", "send"] for each in step.sent()]

    copy = 512 * 1024 * 4
    assert [more - less for more, less in zip(sent(True), sent(False), strict=True)] == [copy, copy]


@pytest.mark.parametrize("per_host", [1, 4])
def test_secondary_shards_are_gathered_inside_of_hosts_and_refreshed_between_them(per_host):
    run = SimulatedRun({"dp": 8}, 1, "bf16", per_host=per_host)
    divided = Sharing(optimizer=True, gradients=True, parameters=True)
    before = data_parallel_step(UNITS, run, divided)
    step = data_parallel_step(UNITS, run, replace(divided, secondary=True))
    sent, hosts = step.sent()[0], 8 // per_host
    values = run.bytes.parameter * SHAPE.parameters
    assert ("dp", "all_gather") not in sent
    assert sent["dp.far", "all_gather"] == pytest.approx(values / per_host * (hosts - 1) / hosts)
    inside = (per_host - 1) / per_host / (7 / 8) * before.sent()[0]["dp", "all_gather"]
    assert sent.get(("dp.near", "all_gather"), 0) == pytest.approx(inside)
    more = step.held[0]["parameters"] - before.held[0]["parameters"]
    assert more == pytest.approx(values / per_host)
