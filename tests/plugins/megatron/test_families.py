"""Families beside plain decoders, divided over layers or stages: equal to one process."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import case
from divided_steps import check_two_steps
from drivetrain_megatron.tensor.linear import computes_as_linear
from families import FAMILIES

TP, PP = {"tp": 2}, {"pp": 2, "micro_batches": 1}
CASES = [
    ("t5", TP, 0.55),  # attention adds a bias of all heads
    ("swin", TP, 1.0),
    ("whisper", PP, 1.0),
]
"""A family, the cell, and a bound of the share that a rank has. The zoo has them all."""


@pytest.mark.ranks(2)
def test_two_steps_equal_one_process():
    """Nobody gives them example inputs; the batch is not cut, since a loss over pairs cannot be."""
    for name, cell, share in CASES:
        torch.manual_seed(0)
        family = FAMILIES[name]
        model = family.build()[0].eval()
        with case(name, cell):  # some losses are in fp32
            assert check_two_steps(model, family.batch(0), cell, 1e-6) <= share


class OtherCode(nn.Linear):
    def forward(self, x):
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(()) * self.training


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, 2 * self.weight, self.bias)


class Detached(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


def test_a_subclass_is_tried():
    for bias in (False, True):
        assert computes_as_linear(OtherCode(3, 4, bias, device="meta"))
        for kind in (Noisy, Scaled, Detached):
            assert not computes_as_linear(kind(3, 4, bias))
