"""Several models in one Accelerator, several Accelerators in one process, and taking one off."""

import pytest
import torch

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.suite import Suite
from drivetrain.testing.conformance.twins import Twins, adamw, momentum
from drivetrain.testing.models import CASES


class SeveralChecks(Suite):
    """Nothing about a strategy is global."""

    def test_several_models(self, world: int) -> None:
        """Models in turn, a loss over both, and backward in another order than forward."""
        with self.accelerator() as accelerator:
            one = Twins(accelerator, CASES["mlp"], momentum)
            two = Twins(accelerator, CASES["tied"], adamw)
            both = (one, two)
            for twins in both:
                twins.backward(0)
                twins.step()
            accelerator.backward(one.loss(1) + two.loss(1))
            for twins in both:
                twins.backward_twin(1)
                twins.step()
            losses = [twins.loss(2) for twins in both]
            for twins, loss in zip(both, losses, strict=True):
                accelerator.backward(loss)
                twins.backward_twin(2)
            for twins in both:
                twins.step()
                twins.check()

    def test_several_accelerators(self, world: int) -> None:
        """Two Accelerators train two models step by step in turn."""
        with self.accelerator() as first, self.accelerator() as second:
            both = [Twins(first, CASES["mlp"]), Twins(second, CASES["mlp"], adamw)]
            for step in range(3):
                for twins in both:
                    twins.backward(step)
                for twins in both:
                    twins.step()
            for twins in both:
                twins.check()

    def test_taken_off(self, world: int) -> None:
        """After ``free_memory`` the user's module trains by itself, without communication."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, CASES["mlp"])
            twins.backward(0)
            twins.step()
            inner = accelerator.unwrap_model(twins.model)
            divided = accelerator.strategy_of(twins.model).forward_is_collective
            accelerator.free_memory()
            before = accelerator.traffic.total()
            if divided:  # no rank has the values: that is said at once
                with pytest.raises(UsageError, match="divided"):
                    twins.case.loss(inner, twins.case.batch(1, twins.axis.rank))
                assert accelerator.traffic.total() == before, "a closed strategy communicates"
                return
            gradients = []
            for model in (inner, twins.twin):
                loss = twins.case.loss(model, twins.case.batch(1, twins.axis.rank))
                torch.autograd.backward(loss)
                gradients.append([p.grad for p in model.parameters()])
            torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)
            assert accelerator.traffic.total() == before, "a closed strategy still communicates"
