"""The state of channels that were given up: what a new channel takes, and what waits on."""

from types import SimpleNamespace

import torch
from torch import Tensor

from drivetrain.collectives.stretch import ParameterSpan
from drivetrain.links.compressor import Kept
from drivetrain.links.kept import ParkedState


def sum_of(first: int, errors: Tensor) -> SimpleNamespace:
    span = ParameterSpan("weight", 900, 30, first, 0, errors.numel())
    return SimpleNamespace(feedback=lambda: [Kept(span, errors)], factors=lambda: [])


def test_errors_that_a_new_sum_does_not_take_wait_at_their_places():
    parked, every = ParkedState(), torch.arange(900.0)
    parked.park(SimpleNamespace(reduction=sum_of(100, every[100:800]), spans=[], sums=0))
    taken, left = torch.zeros(300), torch.zeros(900)
    parked.give(sum_of(200, taken))
    for _, (first, errors) in parked:
        left[first : first + errors.numel()] += errors
    assert torch.equal(taken, every[200:500])
    expected = torch.zeros(900)
    expected[100:200], expected[500:800] = every[100:200], every[500:800]
    assert torch.equal(left, expected)
