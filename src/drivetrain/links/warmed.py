"""A channel of gradients that is exact at first, and that can take a step back."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drivetrain.collectives import Handle, Parts
from drivetrain.collectives.stretch import ParameterSpan
from drivetrain.links.compressor import FarReduction


class Warmed:
    """A channel of gradients that is exact at first.

    Args:
        reduction: the approximate sum between hosts.
        spans: the ranges of parameters that it is about.
        warmup: how many sums are exact.
        exact: the channel for the first sums.
        approximate: the channel for the others.
        undoable: whether a step may be skipped: then errors and factors of before the step are
            kept, too.

    Attributes:
        reduction: the approximate sum between hosts.
        spans: the ranges of parameters that it is about.
        sums: how many there were.
    """

    def __init__(
        self,
        reduction: FarReduction,
        spans: Sequence[ParameterSpan],
        warmup: int,
        exact: Callable[..., Handle],
        approximate: Callable[..., Handle],
        *,
        undoable: bool,
    ) -> None:
        self.reduction = reduction
        self.spans = spans
        self.sums = 0
        self._warmup = warmup
        self._exact = exact
        self._approximate = approximate
        self._undoable = undoable
        self._sums_of_step = 0
        self._copied = False
        self._before: list[Tensor] = []

    def __call__(self, tensors: Tensor | Parts) -> Handle:
        """Start the sum."""
        self.sums += 1
        self._sums_of_step += 1
        if self.sums <= self._warmup:
            return self._exact(tensors)
        if self._undoable and not self._copied:  # a step may have several sums
            self._copy()
        return self._approximate(tensors)

    def step_decided(self, *, taken: bool) -> None:
        """Go on after a step; if it was skipped, as if none of its sums had been.

        Args:
            taken: whether optimizers step.
        """
        if not taken:
            self.sums -= self._sums_of_step
            if self._copied:
                torch._foreach_copy_(self._state(), self._before)
        self._begin_step()

    def resume(self, sums: int) -> None:
        """Go on with the state of a checkpoint, which is in the errors and factors already.

        Args:
            sums: how many there were.
        """
        self.sums = sums
        self._begin_step()

    def _begin_step(self) -> None:
        self._sums_of_step, self._copied = 0, False

    def _copy(self) -> None:
        """Copy errors and factors, as they are before the first sum of a step."""
        state = self._state()
        if [each.device for each in self._before] != [each.device for each in state]:
            self._before = [torch.empty_like(each) for each in state]
        torch._foreach_copy_(self._before, state)
        self._copied = True

    def _state(self) -> list[Tensor]:
        errors = [kept.errors for kept in self.reduction.feedback()]
        return [*errors, *(factor for _, factor in self.reduction.factors())]
