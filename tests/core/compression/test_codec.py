"""Sums of encoded tensors: which gradients are finite, and seeds of which no two are alike."""

import torch

from drivetrain.collectives.volume import ParameterSpan
from drivetrain.compression.compressor import is_finite, seed_of


def test_finite_numbers_of_half_precision_may_have_a_sum_beyond_it():
    values = torch.full((4096,), 60000.0, dtype=torch.float16)
    assert is_finite(values)
    values[17] = float("nan")
    assert not is_finite(values)


def test_no_two_messages_have_the_same_seed():
    places = (("one", 0), ("one", 4096), ("two", 0))
    spans = [ParameterSpan(name, 8192, 64, first, 0, 4096) for name, first in places]
    seeds = [seed_of([s], rank, sums) for s in spans for rank in range(2) for sums in range(3)]
    assert len(set(seeds)) == len(seeds)
