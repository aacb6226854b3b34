"""What sums of encoded tensors ask of gradients."""

import torch

from drivetrain.links.codec import is_finite


def test_finite_numbers_of_half_precision_may_have_a_sum_beyond_it():
    values = torch.full((4096,), 60000.0, dtype=torch.float16)
    assert is_finite(values)
    values[17] = float("nan")
    assert not is_finite(values)
