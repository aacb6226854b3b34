"""A channel that is exact at first, and takes steps back."""

from types import SimpleNamespace

import torch

from drivetrain.collectives.stretch import ParameterSpan
from drivetrain.links.compressor import Kept
from drivetrain.links.kept import Warmed


def test_the_warm_up_counts_the_sums_of_steps_that_were_taken():
    kept, sums = Kept(ParameterSpan("weight", 9, 3, 0, 0, 9), torch.zeros(9)), []
    reduction = SimpleNamespace(feedback=lambda: [kept], factors=lambda: [])
    ways = [lambda tensors: sums.append("exact"), lambda tensors: sums.append("approximate")]
    warmed = Warmed(reduction, [kept.span], 3, *ways, undoable=True)
    for summed, taken in ((1, True), (2, False), (2, True), (1, True)):
        for _ in range(summed):
            warmed(kept.errors)
        warmed.step_decided(taken=taken)
    assert sums == ["exact"] * 5 + ["approximate"]
