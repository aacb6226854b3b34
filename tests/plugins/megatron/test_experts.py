"""Mixtures of experts under tensor and pipeline parallelism: equal to one process."""

import pytest
import torch

from cases import case
from divided_steps import check_two_steps
from mixture_models import BATCH, FAMILIES, LABELED, huggingface, looped


@pytest.mark.ranks(2)
def test_experts_in_a_loop():
    for cell in ({"tp": 2}, {"pp": 2}):
        torch.manual_seed(0)
        with case(cell):
            # Also of the experts that no token has chosen.
            assert check_two_steps(looped(), BATCH, cell, 1e-12) < 0.52


@pytest.mark.ranks(2)
def test_experts_of_hugging_face():
    for name in ("mixtral", "gpt_oss", "granite"):
        torch.manual_seed(0)
        with case(name):
            assert check_two_steps(huggingface(name), LABELED, {"tp": 2}) < 0.62
    torch.manual_seed(0)
    check_two_steps(huggingface("gpt_oss"), LABELED, {"pp": 2, "micro_batches": 1})
    for implementation, tolerance in ((None, 1e-4), ("batched_mm", 1e-7)):
        torch.manual_seed(0)
        model = huggingface("gpt_oss", implementation)
        if implementation is None:
            model = model.float()  # a product of groups has no fp64
        with case(implementation):
            assert check_two_steps(model, LABELED, {"tp": 2}, tolerance) < 0.62


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_other_experts_of_hugging_face():
    for name in FAMILIES:
        torch.manual_seed(0)
        with case(name):
            assert check_two_steps(huggingface(name), LABELED, {"tp": 2}) < 0.62
