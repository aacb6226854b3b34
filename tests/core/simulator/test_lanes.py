"""A simulated step: times, peaks and bytes of graphs that are worked out by hand."""

import json

import pytest

from drivetrain.errors import UsageError
from drivetrain.simulator.contract import Sharing, UnitCost, data_parallel_step, stage_bound
from drivetrain.simulator.step import (
    Collective,
    SimulatedRun,
    SimulatedStep,
    SimulatedTask,
    flops_of,
    play,
    write_trace,
)
from drivetrain.simulator.transformer import GptShape


class Seconds:
    """Every compute task takes 2 seconds, every collective 1."""

    def __init__(self, slowdown=0.0):
        self.slowdown = slowdown

    def seconds(self, task):
        return (2.0 if task.lane == "compute" else 1.0) * task.repeat


MESSAGE = (Collective("dp", "all_reduce", 100.0),)
SHAPE = GptShape(layers=2, hidden=64, heads=4, seq=16, vocab=128)
UNITS = SHAPE.units(2, "none", fused=False)


def test_lanes_run_side_by_side_and_wait_for_what_they_need():
    tasks = [
        SimulatedTask("a", takes=10, frees=10, during=8),
        SimulatedTask("reduce a", MESSAGE, "dp", after=(0,)),
        SimulatedTask("b", takes=30, during=5),
        SimulatedTask("last", after=(1,)),
    ]
    played = play(SimulatedStep(tasks, [{"parameters": 100}]), Seconds())
    assert [(each.start, each.stop) for each in played.tasks] == [(0, 2), (2, 3), (2, 4), (4, 6)]
    assert played.seconds == 6
    assert (played.peaks, played.computing) == ([135], [6])
    together = [
        SimulatedTask("a", takes=10, frees=10),
        SimulatedTask("reduce", MESSAGE, "dp", takes=30, frees=30),
    ]
    assert play(SimulatedStep(together, [{}]), Seconds()).peaks == [40]

    tasks = [SimulatedTask("a", after=(1,)), SimulatedTask("b", MESSAGE, "dp", after=(0,))]
    with pytest.raises(UsageError, match="'a' waits for ever"):
        play(SimulatedStep(tasks, [{}]), Seconds())

    # Three units, two of them alike; backward frees the last one before it reaches the others.
    block = UnitCost({"compute": 2.0, "dp": 1.0}, {"dp": 30.0}, held=10, kept=4, during=20)
    head = UnitCost({"compute": 1.0}, {"compute": 0.5}, held=5, kept=3, during=1)
    found = stage_bound([(block, 2), (head, 1)], micro_batches=3, in_flight=2)
    assert found.seconds == 2 * (3 * 1.0 + 30.0)
    assert found.nbytes == 25 + (11 + 20)  # at the turn it would be 22 + 1
    assert stage_bound([(head, 1)], micro_batches=3, in_flight=1).seconds == 3.5


def test_compute_beside_collectives_is_slower():
    tasks = [
        SimulatedTask("a"),
        SimulatedTask("reduce a", MESSAGE, "dp", after=(0,)),
        SimulatedTask("b"),
    ]
    assert play(SimulatedStep(tasks, [{}]), Seconds(slowdown=0.5)).seconds == 2 + 2 + 0.5

    tasks = [SimulatedTask("a"), SimulatedTask("long", repeat=5)]
    tasks += [SimulatedTask(f"reduce {at}", MESSAGE, "dp", after=(0,)) for at in range(3)]
    played = play(SimulatedStep(tasks, [{}]), Seconds(slowdown=0.5))
    # Three seconds of collectives take 4.5 beside compute, which gets three seconds done.
    assert [each.stop for each in played.tasks[2:]] == pytest.approx([3.5, 5.0, 6.5])
    assert played.seconds == pytest.approx(2 + 10 + 3 * 0.5)

    tasks = [SimulatedTask("a")]
    tasks += [SimulatedTask(f"reduce {at}", MESSAGE, "dp", after=(0,)) for at in range(6)]
    tasks += [SimulatedTask("b"), SimulatedTask("c", MESSAGE, "pp"), SimulatedTask("d")]
    played = play(SimulatedStep(tasks, [{}]), Seconds(slowdown=1.0))
    assert played.seconds == pytest.approx(2 + 6 + 1 + 4)


def test_bytes_of_data_parallelism_are_those_of_the_paper_whatever_the_buckets():
    total = sum(unit.elements for unit in UNITS) * 4
    run = SimulatedRun({"dp": 2}, 1, "no")
    for bucket, count in ((0, len(UNITS)), (total, 1), (10 * total, 1)):
        step = data_parallel_step(UNITS, run, Sharing(bucket=bucket))
        messages = [each for each in step.tasks if each.lane == "dp"]
        assert len(messages) == count
        assert step.sent()[0]["dp", "all_reduce"] == total

    # Volumes of Rajbhandari et al. 2020, section 7, gradients per micro-batch from stage 2.
    kinds = ("optimizer", "gradients", "parameters")
    for divided, sent in (
        ((), {"all_reduce": 2 * 2}),
        (("optimizer",), {"reduce_scatter": 2, "all_gather": 2}),
        (("optimizer", "gradients"), {"reduce_scatter": 3 * 2, "all_gather": 2}),
        (kinds, {"reduce_scatter": 3 * 2, "all_gather": 3 * 2}),
    ):
        run = SimulatedRun({"dp": 4}, micro_batches=3, precision="fp16")
        step = data_parallel_step(UNITS, run, Sharing(**dict.fromkeys(divided, True)))
        share = SHAPE.parameters * 3 / 4
        found = {key[1]: nbytes / share for key, nbytes in step.sent()[0].items()}
        assert found == pytest.approx(sent)
        for kind, each in (("parameters", 2), ("gradients", 2), ("optimizer", 16)):
            parts = 4 if kind in divided else 1
            assert step.held[0][kind] == pytest.approx(SHAPE.parameters * each / parts)


def test_buffers_that_whole_gradients_pass_through_are_held():
    """Each holds the largest block, or a bucket; there are no more of them than messages."""
    run = SimulatedRun({"dp": 4}, micro_batches=1, precision="fp16")
    block = max(unit.elements for unit in UNITS if unit.repeated)
    messages = -(-SHAPE.parameters // block)
    for sharing, held in (
        (Sharing(optimizer=True, gradients=True, lent=2), 2 * block * 2),
        (Sharing(optimizer=True, gradients=True, lent=2, bucket=2000), 2 * 2000),
        (Sharing(optimizer=True, gradients=True, lent=99), messages * block * 2),
        (Sharing(optimizer=True, gradients=True), 0),
    ):
        assert data_parallel_step(UNITS, run, sharing).held[0].get("lent", 0) == held, sharing


def test_units_are_gathered_again_for_backward_but_for_the_last_ones():
    """The last two blocks stay from forward to backward, and so do embedding and head."""
    shape = GptShape(layers=6, hidden=64, heads=4, seq=16, vocab=128)
    units = shape.units(2, "none", fused=False)
    blocks = [unit for unit in units if unit.repeated]
    run = SimulatedRun({"dp": 4}, micro_batches=3, precision="fp16")
    sharing = Sharing(optimizer=True, gradients=True, parameters=True)
    gathered = data_parallel_step(units, run, sharing).sent()[0]["dp", "all_gather"]
    again = 4 * blocks[0].elements
    assert gathered == pytest.approx(3 * 2 * (shape.parameters + again) * 3 / 4)


def test_activations_operations_and_parameters_are_those_of_the_papers():
    # Korthikanti et al. 2022, section 4: s b h (34 + 5 a s / h) bytes.
    s, b, h, a = SHAPE.seq, 2, SHAPE.hidden, SHAPE.heads
    assert UNITS[1].kept == s * b * h * (34 + 5 * a * s / h)
    full = SHAPE.units(b, "full", fused=False)[1]
    assert (full.kept, full.kept + full.transient) == (2 * s * b * h, UNITS[1].kept)
    selective = SHAPE.units(b, "selective", fused=False)[1]
    assert selective.kept == s * b * h * 34

    # Narayanan et al. 2021, appendix: 24 B s h^2 (1 + s / 6h) per layer and forward.
    s, b, h = SHAPE.seq, 2, SHAPE.hidden
    forward = 24 * b * s * h**2 * (1 + s / (6 * h))
    assert flops_of(UNITS[1].forward) == pytest.approx(forward)
    assert flops_of(UNITS[1].backward) == pytest.approx(2 * forward)
    head = 6 * b * s * h * SHAPE.vocab
    assert SHAPE.model_flops(b) == pytest.approx(3 * SHAPE.layers * forward + head)

    sizes = {"layers": 3, "hidden": 64, "heads": 8, "seq": 16, "vocab": 128, "ffn": 96}
    shape = GptShape(**sizes, kv_heads=2, gated=True)
    units = shape.units(2, "none", fused=False)
    assert 3 * sum(flops_of(unit.forward) for unit in units) == shape.model_flops(2)
    products = 64 * (64 + 2 * 16) + 64 * 64 + 3 * 64 * 96  # three matrices of a gated layer
    assert units[1].elements == products + (64 + 2 * 16) + 2 * 96 + 6 * 64

    h, v, s = SHAPE.hidden, SHAPE.vocab, SHAPE.seq
    layer = 12 * h * h + 13 * h
    assert SHAPE.parameters == SHAPE.layers * layer + (v + s) * h + 2 * h
    untied = GptShape(layers=2, hidden=64, heads=4, seq=16, vocab=128, tied=False)
    assert untied.parameters == SHAPE.parameters + v * h


def test_the_trace_has_every_task_in_its_lane(tmp_path):
    step = data_parallel_step(UNITS, SimulatedRun({"dp": 2}, 1, "bf16"))
    played = play(step, Seconds())
    write_trace(played, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    drawn = [lanes[event["tid"]] for event in events if event["ph"] == "X"]
    assert drawn == [each.task.lane for each in played.tasks]
    assert {"compute", "dp"} == set(drawn)
    lasting = [event["dur"] for event in events if event["ph"] == "X"]
    expected = [1e6 * (each.stop - each.start) for each in played.tasks]
    assert lasting == pytest.approx(expected)  # microseconds
