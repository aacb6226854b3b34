"""Parity: k steps on many ranks are k steps of one process, for every awkward model."""

import copy

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from drivetrain.testing.conformance.suite import Suite
from drivetrain.testing.conformance.twins import Twins, adamw, momentum, plain_sgd, weights
from drivetrain.testing.models import CASES

STEPS = 3


class ParityChecks(Suite):
    """Losses, gradients and weights against one process."""

    def test_training_equals_one_process(self, world: int, case: str) -> None:
        """Losses and weights of SGD with momentum and AdamW, and the gradients themselves."""
        chosen = CASES[case]
        with self.accelerator() as accelerator:
            # A step of plain SGD with a rate of 1 subtracts the gradient: the weights show it.
            gradient = Twins(accelerator, chosen, plain_sgd)
            gradient.backward(0)
            gradient.step()
            gradient.check()
        if chosen.large:
            return
        for make_optimizer in (momentum, adamw):
            with self.accelerator() as accelerator:
                twins = Twins(accelerator, chosen, make_optimizer)
                for step in range(STEPS):
                    twins.backward(step)
                    twins.step()
                twins.check()

    def test_parameter_without_gradient_on_any_rank(self, world: int) -> None:
        """It stays as it is, or moves exactly as with a gradient of zeros."""

        def decaying(model: nn.Module) -> Optimizer:
            return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

        with self.accelerator() as accelerator:
            twins = Twins(accelerator, CASES["unused"], decaying)
            as_zeros = copy.deepcopy(twins.twin)
            zeros_optimizer = decaying(as_zeros)
            for step in range(STEPS):
                twins.backward(step)
                for p, q in zip(twins.twin.parameters(), as_zeros.parameters(), strict=True):
                    q.grad = torch.zeros_like(q) if p.grad is None else p.grad.clone()
                zeros_optimizer.step()
                twins.step()
            ours = weights(accelerator, twins.model)["unused.weight"]
            allowed = [model.get_parameter("unused.weight") for model in (twins.twin, as_zeros)]
            assert any(torch.allclose(ours, one, rtol=1e-10) for one in allowed), (
                "a parameter that got no gradient moved, and not as with a gradient of zeros"
            )
