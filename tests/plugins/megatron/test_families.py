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


def of(forward):
    return type("Another", (nn.Linear,), {"forward": forward})


def own_code(m, x):
    out = x @ m.weight.T
    return out if m.bias is None else out + m.bias


def test_a_subclass_is_tried():
    for bias in (False, True):
        assert computes_as_linear(of(own_code)(3, 4, bias, device="meta"))
        for forward in (
            lambda m, x: F.linear(x, m.weight, m.bias) + torch.rand(()) * m.training,
            lambda m, x: F.linear(x, 2 * m.weight, m.bias),
            lambda m, x: F.linear(x, m.weight.detach(), m.bias),
        ):
            assert not computes_as_linear(of(forward)(3, 4, bias))
