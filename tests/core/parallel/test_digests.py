"""Digests tell values apart: a change anywhere, also in tensors of many rows and odd ends."""

import pytest
import torch

from drivetrain.parallel.unit import digest


@pytest.mark.parametrize("numel", [1, 7, 8186, 20_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_element_counts_with_its_place(numel, dtype):
    values = torch.arange(numel).to(dtype) % 101
    before = digest(values)
    assert digest(values.clone()) == before
    for place in {0, numel // 2, numel - 1}:
        changed = values.clone()
        changed[place] += 1
        assert digest(changed) != before, place
    if numel > 1:
        assert digest(values.roll(1)) != before
