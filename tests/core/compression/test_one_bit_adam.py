"""1-bit Adam in one process against the algorithm by hand."""

import torch
from torch import nn
from torch.optim import Adam, AdamW

from drivetrain.compression.one_bit_adam import FrozenAdam
from one_bit_steps import STEPS, WARMUP, frozen_steps


def test_steps_are_those_of_the_algorithm():
    for kind in (Adam, AdamW):
        generator = torch.Generator().manual_seed(5)
        start = torch.randn(16, 8, generator=generator)
        weight, expected = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        optimizer, other = (kind([each], lr=0.01, weight_decay=0.1) for each in (weight, expected))
        adam = FrozenAdam("ddp", WARMUP)
        adam.add(optimizer)
        for step in range(STEPS):
            gradient = torch.randn(16, 8, generator=generator)
            if step < WARMUP:
                # Later ones of this column are beyond Adam's bound of a step.
                gradient[:, 0] *= 1e-3
            weight.grad, expected.grad = gradient.clone(), gradient.clone()
            adam.exchange({weight: weight.grad}, 1)()
            optimizer.step()
            if step < WARMUP:
                other.step()
            else:
                gradients = {expected: [gradient]}
                frozen_steps(other.param_groups[0], other.state, gradients, step, kind)
            torch.testing.assert_close(weight.detach(), expected.detach(), rtol=0, atol=1e-6)
        adam.close()
