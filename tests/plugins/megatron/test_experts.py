"""Mixtures of experts under tensor and pipeline parallelism: equal to one process."""

import pytest
import torch

from divided_steps import check_two_steps
from mixture_models import BATCH, FAMILIES, LABELED, huggingface, looped

CELLS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}


@pytest.mark.parametrize("cell", list(CELLS.values()), ids=list(CELLS))
@pytest.mark.ranks(2)
def test_experts_in_a_loop(cell):
    torch.manual_seed(0)
    share = check_two_steps(looped(), BATCH, cell, 1e-12)
    assert share < 0.52  # also of the experts that no token has chosen


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.ranks(2)
def test_experts_of_hugging_face_are_divided(name):
    torch.manual_seed(0)
    assert check_two_steps(huggingface(name), LABELED, CELLS["tp2"]) < 0.62


@pytest.mark.ranks(2)
def test_experts_of_hugging_face_in_stages():
    torch.manual_seed(0)
    model = huggingface("gpt_oss")
    check_two_steps(model, LABELED, {"pp": 2, "micro_batches": 1})


@pytest.mark.parametrize("implementation", [None, "batched_mm"])
@pytest.mark.ranks(2)
def test_implementations_of_experts(implementation):
    torch.manual_seed(0)
    model = huggingface("gpt_oss", implementation)
    if implementation is None:
        model = model.float()  # a product of groups has no fp64
    tolerance = 1e-4 if implementation is None else 1e-7
    assert check_two_steps(model, LABELED, CELLS["tp2"], tolerance) < 0.62
