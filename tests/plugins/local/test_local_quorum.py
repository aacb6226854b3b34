"""The agreement on an exchange, and the results for late workers, over a store of one process."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from drivetrain import ConfigError
from drivetrain.collectives.communicator import Finished
from drivetrain.runtime.world import World
from drivetrain_local import sync
from drivetrain_local.sync import HandedState, Quorum, check_world


def test_whoever_stood_ready_for_an_earlier_exchange_is_not_waited_for():
    store = HashStore()
    first, second = (Quorum(store, worker, 2, late_s=0.0) for worker in range(2))
    assert first.decide(1, opens=True).workers == [0]
    late = second.decide(1, opens=True)
    assert (late.number, late.workers) == (1, [0])
    assert second.decide(2, opens=False) is None, "nobody stands ready"
    assert second.decide(2, opens=True).workers == [1]


def handed_state(store):
    def broadcast(tensor, label):
        return Finished()

    ranks = SimpleNamespace(rank=0, barrier=lambda: None, broadcast=broadcast)
    return HandedState(store, ranks, timedelta(seconds=1))


def test_results_are_deleted_when_nobody_reads_them_any_more(monkeypatch):
    monkeypatch.setattr(sync, "PIECE_BYTES", 16)
    store = HashStore()
    state, tensors = handed_state(store), [torch.arange(9.0), torch.ones(3)]

    def pieces():
        return [n for n in range(1, 5) if store.check([f"{n}/0/0"])]

    state.put(1, tensors)
    state.put(2, tensors)
    assert pieces() == [2]
    store.add("readers", 1)  # a worker that may be reading the second result
    state.put(3, [each + 1 for each in tensors])
    assert pieces() == [2, 3]
    found = [torch.zeros(9), torch.zeros(3)]
    assert state.take(2, found) == 3
    assert all(torch.equal(a, b + 1) for a, b in zip(found, tensors, strict=True))
    store.add("readers", -1)
    state.put(4, tensors)
    assert pieces() == [4]


def test_late_workers_are_refused_on_accelerators_and_over_other_backends():
    check_world(1.0, World(backend="gloo"))
    for device, backend in (("cpu", "mpi"), ("cuda", "gloo")):
        with pytest.raises(ConfigError, match="strategy.late_s: expected ranks on the CPU"):
            check_world(1.0, World(device=torch.device(device), backend=backend))
