"""Generators: seeds, exact round trips, forks, one state on all ranks."""

import random
import sys
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from drivetrain.data.loader import synchronize_rng_states
from drivetrain.errors import UsageError
from drivetrain.runtime import rng

try:
    import numpy
except ImportError:
    numpy = None


def draw():
    numbers = [random.random(), random.gauss(0, 1), torch.rand(()).item()]
    if numpy is not None:
        numbers += [numpy.random.rand(), numpy.random.randn()]
    return numbers


def test_set_seed_repeats_every_generator():
    for seed in (5, 1 << 40):  # the second is beyond numpy's limit
        rng.set_seed(seed)
        first = draw()
        rng.set_seed(seed)
        assert draw() == first
        rng.set_seed(6)
        assert draw() != first
    try:
        rng.set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_capture_and_restore_round_trip_exactly():
    rng.set_seed(1)
    draw()  # an odd number of Gaussians: each generator keeps the other one of the pair
    state = rng.capture()
    assert all(value.dtype in (torch.int64, torch.uint8) for value in state.values())
    first = draw()
    draw()
    left_out = rng.restore(state)
    assert draw() == first
    assert left_out == ()


def test_restore_refuses_what_it_does_not_know():
    with pytest.raises(UsageError, match="'perl'"):
        rng.restore({"perl": torch.zeros(1)})
    for key in rng.capture():
        for wrong in (torch.zeros(9, dtype=torch.int64), torch.zeros(3), torch.tensor(1)):
            found = f"a state of {key} with .* found shape .* take another checkpoint"
            with pytest.raises(UsageError, match=found):
                rng.restore({key: wrong})


def test_fork_puts_everything_back():
    rng.set_seed(3)
    expected = draw()
    rng.set_seed(3)
    with rng.fork(9):
        inside = draw()
    assert draw() == expected
    rng.set_seed(3)
    again = []
    with suppress(ZeroDivisionError), rng.fork(9):
        again = draw()
        raise ZeroDivisionError
    assert again == inside
    assert draw() == expected


def test_numpy_is_never_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    state = rng.capture()
    assert set(state) == {"python", "torch"}
    rng.set_seed(1)
    assert rng.restore({"numpy": torch.zeros(627, dtype=torch.int64)}) == ("numpy",)
    assert "numpy" not in sys.modules


def test_ranks_that_have_not_met_are_seeded_apart(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    rng.set_seed(4, device_specific=True)
    mine = draw()
    rng.set_seed(7)
    assert draw() == mine


@pytest.mark.ranks(2)
def test_states_of_rank_0_reach_every_rank():
    rng.set_seed(4, device_specific=True)
    mine = torch.rand(()).item()
    rng.set_seed(4 + dist.get_rank())
    assert torch.rand(()).item() == mine
    generator = torch.Generator()
    generator.manual_seed(dist.get_rank())
    synchronize_rng_states(["torch", "python", "numpy", "generator"], generator)
    drawn = [None, None]
    dist.all_gather_object(drawn, [*draw(), torch.rand((), generator=generator).item()])
    assert drawn[0] == drawn[1]
    with pytest.raises(UsageError, match=r"among .*'numpy'.*, found \['torch', 'dice'\]"):
        synchronize_rng_states(["torch", "dice"])
