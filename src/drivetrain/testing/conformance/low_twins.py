"""The same low-precision training twice: by a strategy, and by one process that rounds alike."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from drivetrain import Accelerator
from drivetrain.testing.conformance.twins import weights
from drivetrain.testing.models import Batch, Case

Loss: TypeAlias = Callable[[nn.Module, Batch], Tensor]

LIMIT = 0.3
"""Norm that gradients are clipped to; every case starts with a larger norm."""


class _Computed(nn.Module):
    """Calls a function in place of a model's forward; its output becomes fp32."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute as the function does."""
        return self._function(*inputs).float()


def in_fp32(case: Case) -> Case:
    """Return a case whose model and numbers are fp32."""

    def batch(step: int, rank: int) -> Batch:
        given = case.batch(step, rank)
        inputs = given.inputs.float() if given.inputs.is_floating_point() else given.inputs
        return given._replace(inputs=inputs)

    return Case(name=case.name, factory=lambda: case.factory().float(), batch=batch, loss=case.loss)


def autocast_loss(case: Case, dtype: torch.dtype | None) -> Loss:
    """Return a case's loss with a forward that computes in a dtype; None computes as given."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        def forward(*inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                outputs: Tensor = model(*inputs)
            return outputs

        return case.loss(_Computed(forward), batch)

    return loss


def copies_loss(case: Case, dtype: torch.dtype) -> Loss:
    """Return a case's loss with a forward that reads low copies of matrices, by autocast too."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        copies = {name: p.to(dtype) if p.dim() > 1 else p for name, p in model.named_parameters()}

        def forward(*inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                outputs: Tensor = torch.func.functional_call(model, copies, inputs)
            return outputs

        return case.loss(_Computed(forward), batch)

    return loss


def quick_sgd(model: nn.Module) -> Optimizer:
    """Return SGD whose steps are large beside the rounding of weights."""
    return SGD(model.parameters(), lr=0.5, momentum=0.5)


class LowTwins:
    """A model under the strategy, and one process that does the same to all ranks' batches.

    Args:
        accelerator: trains the one.
        case: the model, its batches and its loss.
        loss: the loss of the other.
        rounding: largest relative error of the first loss.
    """

    def __init__(
        self, accelerator: Accelerator, case: Case, loss: Loss, *, rounding: float = 1e-6
    ) -> None:
        self._accelerator = accelerator
        self._case = case
        self._loss = loss
        self._rounding = rounding
        self._axis = accelerator.mesh["dp"]
        self._twin = case.build()
        self._start = [p.detach().clone() for p in self._twin.parameters()]
        self._twin_optimizer = quick_sgd(self._twin)
        built = case.build()
        self.model, self.optimizer = accelerator.prepare(built, quick_sgd(built))

    def train(self, step: int, factors: Sequence[float], *, clip: bool = False) -> None:
        """Run one window and one step on both; the first losses of all must be equal.

        Args:
            step: number of the step.
            factors: of the loss of each micro-batch of the window.
            clip: whether gradients are clipped to ``LIMIT``.
        """
        window = len(factors)
        for i, factor in enumerate(factors):
            with self._accelerator.accumulate(self.model):
                self._accelerator.backward(self._first(step * window + i) * factor)
                if clip:
                    self._accelerator.clip_grad_norm_(self.model.parameters(), LIMIT)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self._backward_twin(step * window + i, factor / window)
        if clip:
            norm = nn.utils.clip_grad_norm_(self._twin.parameters(), LIMIT)
            assert step > 0 or norm > LIMIT, f"a norm of {norm} is not clipped"
        self._twin_optimizer.step()
        self._twin_optimizer.zero_grad()
        assert not self._accelerator.optimizer_step_was_skipped, "a finite step was skipped"

    def check(self, tolerance: float, *, rounded: float = 0.0) -> None:
        """Raise when the weights are too far from the twin's.

        Args:
            tolerance: allowed error, relative to how far the weights have moved.
            rounded: allowed error on top, relative to the weights.
        """
        ours = weights(self._accelerator, self.model)
        theirs = {name: p.detach() for name, p in self._twin.named_parameters()}
        assert list(ours) == list(theirs), f"names differ: {list(ours)} != {list(theirs)}"
        error = _norm([ours[key].float() - theirs[key] for key in ours])
        moved = _norm([p - s for p, s in zip(theirs.values(), self._start, strict=True)])
        allowed = tolerance * moved + rounded * _norm(list(theirs.values()))
        assert error <= allowed, (
            f"weights that moved by {moved:.3g} differ from one process by {error:.3g}, "
            f"allowed: {allowed:.3g}"
        )

    def _first(self, number: int) -> Tensor:
        batch = self._case.batch(number, self._axis.rank)
        loss = self._case.loss(self.model, batch)
        if number == 0:
            # Same weights, data and roundings: only the order inside a matrix product may differ.
            theirs = self._loss(self._twin, batch)
            allowed = self._rounding
            torch.testing.assert_close(loss, theirs, rtol=allowed, atol=allowed)
        return loss

    def _backward_twin(self, number: int, factor: float) -> None:
        scale = self._accelerator.scaler.get_scale()
        parameters = list(self._twin.parameters())
        for rank in range(self._axis.size):
            loss = self._loss(self._twin, self._case.batch(number, rank))
            gradients = torch.autograd.grad(loss * (scale * factor), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                share = gradient / (scale * self._axis.size)
                parameter.grad = share if parameter.grad is None else parameter.grad + share


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors])))
