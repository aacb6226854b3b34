"""Offloaded state on paper: bytes of each tier, transfers, and a forward that waits for updates."""

from dataclasses import replace

import pytest

from drivetrain.hardware.description import load_hardware
from drivetrain.planner.layout import read_layout
from drivetrain.planner.search import Predictor, Task, fits, search
from drivetrain.simulator.contract import Sharing, data_parallel_step
from drivetrain.simulator.step import DISK, FROM_HOST, HOST, TO_HOST, SimulatedRun, Stored, play
from drivetrain.simulator.transformer import GptShape

SHAPE = GptShape(layers=2, hidden=64, heads=4, seq=16, vocab=128)
UNITS = SHAPE.units(2, "none", fused=False)
RUN = SimulatedRun({"dp": 4}, micro_batches=3, precision="bf16")
STAGE2 = Sharing(optimizer=True, gradients=True, stored=Stored(optimizer="cpu"))
LARGE = GptShape(layers=32, hidden=4096, heads=32, seq=2048)
ALONE = Task(LARGE, 8, load_hardware("a100-80gb"), 1, 1)


class Lanes:
    """Every task of a lane takes as long as the lane is given."""

    slowdown = 0.3

    def __init__(self, **lanes):
        self.lanes = lanes

    def seconds(self, task):
        return self.lanes.get(task.lane, 0.0) * task.repeat


def test_state_moves_to_the_host_and_back_once_a_step():
    """2 bytes there in bf16 and back, and 28 read and written (docs/planning.md)."""
    step = data_parallel_step(UNITS, RUN, STAGE2)
    share = SHAPE.parameters / 4
    assert step.sent()[0]["bus", TO_HOST] == pytest.approx(share * 4)  # sums are kept in fp32
    assert step.sent()[0]["bus", FROM_HOST] == pytest.approx(share * 2)
    updates = [each for task in step.tasks for each in task.operations if task.lane == HOST]
    assert sum(each.nbytes for each in updates) == pytest.approx(share * (2 * 12 + 4 + 2))
    assert step.held[0]["optimizer"] == step.held[0]["gradients"] == 0
    assert step.stored[0] == pytest.approx({"host": share * (12 + 4), "disk": 0})
    disk = replace(STAGE2, stored=Stored(optimizer="nvme", share=0.5))
    step = data_parallel_step(UNITS, RUN, disk)
    assert step.sent()[0]["bus", FROM_HOST] == pytest.approx(share)
    assert step.sent()[0]["disk", DISK] == pytest.approx(2 * 0.5 * share * 12)  # there and back
    assert step.held[0]["optimizer"] == pytest.approx(share * 6)
    assert step.stored[0] == pytest.approx({"host": share * 2, "disk": share * 6})
    half = data_parallel_step(UNITS, replace(RUN, precision="fp16"), disk)
    assert half.sent()[0]["disk", DISK] == step.sent()[0]["disk", DISK], "gradients are no state"


def test_parameters_come_from_their_store_before_every_gather():
    stored = Stored(optimizer="nvme", parameters="nvme")
    sharing = Sharing(optimizer=True, gradients=True, parameters=True, stored=stored)
    step = data_parallel_step(UNITS, RUN, sharing)
    share = SHAPE.parameters / 4
    assert step.held[0]["parameters"] == 0
    # Three forwards, whose units stay for backward, being only two; and the values of the update.
    assert step.sent()[0]["bus", FROM_HOST] == pytest.approx(share * 2 * (3 + 1))
    gathers = [task for task in step.tasks if task.name.startswith("gather")]
    assert all(step.tasks[task.after[0]].name.startswith("fetch") for task in gathers)


def test_forward_waits_for_the_updates_of_its_units_unless_they_may_be_late():
    """Four units: each forward can begin when one more update has ended."""
    units = UNITS
    compute, updates = 1.0, 10.0
    prices = Lanes(compute=compute, **{HOST: updates})
    run = SimulatedRun({"dp": 1}, 1, "bf16")
    waits = data_parallel_step(units, run, STAGE2)
    count = len([unit for unit in units if unit.elements])
    rest = 1 + len(units) + 1  # the last forward, all of backward, the update on the device
    assert play(waits, prices).seconds == pytest.approx(count * updates + rest * compute)
    late = replace(STAGE2, stored=Stored(optimizer="cpu", delayed=True))
    assert play(data_parallel_step(units, run, late), prices).seconds == count * updates


def test_a_layout_with_a_store_needs_less_memory_and_more_time():
    for data_parallel in ("zero1", "zero2", "zero3", "fsdp"):
        layout = f"data_parallel={data_parallel},micro_batch=1,recompute=full"
        predictor = Predictor(ALONE)
        found = [
            predictor.predict(read_layout(layout + store))
            for store in ("", ",offload=cpu", ",offload=nvme")
        ]
        peaks, seconds = ([getattr(each, name) for each in found] for name in
                          ("peak_bytes", "step_seconds"))  # fmt: skip
        assert peaks[0] > 1.5 * peaks[1] == 1.5 * peaks[2]
        assert seconds[0] < seconds[1] < seconds[2]
        assert fits(ALONE, found[1])
        # A host has the state of all its ranks.
        assert not fits(replace(ALONE, per_host=64), found[1])
        assert found[2].stored_most("disk") == pytest.approx(12 * LARGE.parameters)
        assert found[2].planned.values["offload"] == {"optimizer": "nvme", "path": "offloaded"}
        assert sum(found[1].parts.values()) == pytest.approx(found[1].step_seconds)


def test_a_search_weighs_stores_against_the_memory_of_the_host():
    best = search(ALONE, "bf16").best[0]
    assert best.planned.keys["offload"] == "cpu"
    memory = ALONE.hardware.host.memory.model_copy(update={"gib": 64})
    host = ALONE.hardware.host.model_copy(update={"memory": memory})
    small = ALONE.hardware.model_copy(update={"host": host})
    assert not fits(replace(ALONE, hardware=small), best)
    best = search(replace(ALONE, hardware=small), "bf16").best[0]
    assert best.planned.keys["offload"] == "nvme"
