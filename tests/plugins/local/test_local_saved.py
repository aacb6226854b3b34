"""A checkpoint of all workers as one of them reads it, without ranks."""

from types import SimpleNamespace

import torch

from drivetrain.runtime.parts import Part
from drivetrain_local.state import KeptReader, WorkerReader, optimizers_apart, saved_workers
from drivetrain_local.strategy import LocalState
from read_tensors import InMemory

VALUES = {
    "": 1.0, "0.local@0": 2.0, "0.local@1": 4.0, "0.local@2": 9.0,
    "0.exp_avg": 10.0, "0.exp_avg@1": 20.0, "0.exp_avg@2": 60.0, "0.outer_momentum@": 7.0,
}  # fmt: skip
SAVED = InMemory({("weight", state): torch.full((3,), value) for state, value in VALUES.items()})


def test_a_worker_reads_its_own_state_and_others_the_mean():
    assert saved_workers(SAVED) == 3
    assert optimizers_apart(SAVED) == {0}
    for worker, own, moment in ((0, 2.0, 10.0), (2, 9.0, 60.0), (None, 5.0, 30.0)):
        reader = WorkerReader(SAVED, 3, worker, outer=True)
        found = {state: reader.read("weight", state).tolist() for _, state in reader.keys()}  # noqa: SIM118
        expected = {"": own, "0.exp_avg": moment, "0.outer": 1.0, "0.outer_momentum": 7.0}
        assert found == {state: [value] * 3 for state, value in expected.items()}
        assert reader.read("weight", "", Part.range_of((3,), 1, 3)).tolist() == [own] * 2
        alone = WorkerReader(SAVED, 3, worker, outer=False)
        assert {state for _, state in alone.keys()} == {"", "0.exp_avg"}  # noqa: SIM118


def test_fewer_workers_than_were_saved_go_on_from_the_mean():
    for workers, own in ((2, 5.0), (3, 2.0), (4, 5.0)):
        state = SimpleNamespace(_far=SimpleNamespace(rank=0, size=workers), _alone=False)
        assert LocalState._view(state, SAVED).read("weight").tolist() == [own] * 3


def test_errors_of_another_part_are_not_taken():
    words = {"links.error.int4.0.0@0of2@": 1.0, "links.error.int4.0.0@1of2@": 2.0}
    saved = {("weight", state): torch.full((3,), value) for state, value in words.items()}
    reader = KeptReader(InMemory(saved), {"weight": "0of2"})
    (key,) = reader.keys()
    assert key == ("weight", "links.error.int4.0.0")
    assert reader.read(*key).tolist() == [1.0] * 3
