"""Which optimizers may step what a rank owns: asked of the parameters that they really have."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from drivetrain.errors import UsageError
from drivetrain.parallel.optimizers import check_suits


class ByRow(Optimizer):
    """Divides gradients by their length along the last dim."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                length = p.grad.norm(dim=-1, keepdim=True)
                p.add_(p.grad / (length + 1e-9), alpha=-group["lr"])


def parameters(*tensors):
    return [nn.Parameter(tensor) for tensor in tensors]


MATRIX, VECTOR, NUMBER = torch.randn(5, 3), torch.randn(5), torch.tensor(1.0)
TURNED, ONE_ROW = torch.randn(5, 3).t(), torch.randn(1, 5)


def test_elementwise_ones_may_step_anything_and_those_of_matrices_no_rows():
    given = parameters(MATRIX, VECTOR, NUMBER, TURNED, ONE_ROW)
    for optimizer in (AdamW(given), SGD(given, lr=0.1, momentum=0.9)):
        for cut in ("flat", "rows", "whole"):
            check_suits(optimizer, cut)
    with pytest.raises(UsageError, match="partition: parameter"):
        check_suits(Adafactor(parameters(MATRIX)), "rows")
    check_suits(Adafactor(parameters(MATRIX)), "whole")


def test_one_that_needs_rows_may_step_rows_but_not_where_they_are_cut():
    """Ranks own parts of a vector, and columns of what is transposed or has one row only."""
    check_suits(ByRow(parameters(MATRIX, torch.randn(4, 3, 2))), "rows")
    with pytest.raises(UsageError, match="ranges of flattened parameters"):
        check_suits(ByRow(parameters(MATRIX)), "flat")
    for other in (VECTOR, TURNED, ONE_ROW):
        with pytest.raises(UsageError, match="some rows of a parameter"):
            check_suits(ByRow(parameters(MATRIX, other)), "rows")
        check_suits(ByRow(parameters(MATRIX, other)), "whole")
