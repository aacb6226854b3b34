"""Generators: seeds, exact round trips, forks, one state on all ranks."""

import random
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from drivetrain.data.shared_random import synchronize_rng_states
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
    rng.set_seed(5)
    first = draw()
    rng.set_seed(5)
    assert draw() == first
    rng.set_seed(6)
    assert draw() != first


def test_set_seed_takes_seeds_beyond_numpys_limit():
    rng.set_seed(1 << 40)
    first = draw()
    rng.set_seed(1 << 40)
    assert draw() == first


def test_deterministic_is_passed_on():
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
    with pytest.raises(UsageError, match="625 words"):
        rng.restore({"python": torch.zeros(9, dtype=torch.int64)})


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


def test_numpy_is_never_imported():
    code = (
        "import sys, torch; sys.modules.pop('numpy', None)\n"
        "from drivetrain.runtime import rng\n"
        "rng.set_seed(1); state = rng.capture(); assert set(state) == {'python', 'torch'}, state\n"
        "assert rng.restore({'numpy': torch.zeros(627, dtype=torch.int64)}) == ('numpy',)\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_rng_type():
    with pytest.raises(UsageError, match="'dice'"):
        synchronize_rng_states(["dice"])


@pytest.mark.ranks(2)
def test_device_specific_adds_the_rank():
    rng.set_seed(4, device_specific=True)
    mine = torch.rand(()).item()
    rng.set_seed(4 + dist.get_rank())
    assert torch.rand(()).item() == mine


@pytest.mark.ranks(2)
def test_states_of_rank_0_reach_every_rank():
    rng.set_seed(0, device_specific=True)
    generator = torch.Generator()
    generator.manual_seed(dist.get_rank())
    synchronize_rng_states(["torch", "python", "numpy", "generator"], generator)
    drawn = [None, None]
    dist.all_gather_object(drawn, [*draw(), torch.rand((), generator=generator).item()])
    assert drawn[0] == drawn[1]
