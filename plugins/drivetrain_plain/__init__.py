"""The definition of data parallelism, without an optimisation: the reference of ``verify``.

1. Every rank holds the whole model, and starts from rank 0's parameters and buffers.
2. After the last backward of an accumulation window, each parameter's gradients are gathered.
3. Every rank adds the gradients in the order of the ranks, and divides by their number.
4. A gradient that some ranks lack counts as zeros; one that all ranks lack stays None.
5. The buffers of rank 0 replace those of the other ranks.

One parameter follows the other: no buckets, no overlap, no part of a tensor. With P parameters of
p elements and b bytes, on N ranks: sent per rank and step (N-1) b times the sum of p + 1 over all
parameters; the additional element says whether a rank had a gradient. On one rank nothing is left:
it is an ordinary training loop.

The strategy ``plain``: gathers and averages gradients parameter by parameter, in rank order.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from drivetrain.collectives import sent_elements
from drivetrain.cost import Cost, ModelSpec
from drivetrain.parallel.replicated import ReplicatedStrategy
from drivetrain.runtime.precision import Precision
from drivetrain.strategy import Run

# --- the strategy ``plain`` ---


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainConfig:
    """``plain`` has no options: there is one definition."""


class Plain(ReplicatedStrategy[PlainConfig]):
    """Whole models over the mesh axis ``dp``; one object per prepared model."""

    summary: ClassVar[str] = "whole models, gradients averaged one by one, the reference of verify"
    Config: ClassVar[type] = PlainConfig

    @classmethod
    def check_options(cls, config: PlainConfig, precision: Precision) -> None:
        """Refuse every dtype beside that of the parameters."""
        precision.refuse(
            "plain", "param", "reduce", "master", instead="leave it out, or take another strategy"
        )

    def average(self) -> None:
        """Average the gradient of one parameter after the other."""
        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.grad = self._mean(parameter)

    def _mean(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the mean of a parameter's gradients over the ranks; None where no rank has one."""
        rows = parameter.new_zeros(self.ranks.size, parameter.numel() + 1)
        if parameter.grad is not None:
            rows[self.ranks.rank, :-1] = parameter.grad.reshape(-1)
            rows[self.ranks.rank, -1] = 1
        self.ranks.all_gather(rows.view(-1), label="gradient").wait()
        if not rows[:, -1].any():
            return None
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = torch.zeros(parameter.numel(), dtype=wide, device=rows.device)
        for row in rows:
            total += row[:-1]
        mean = (total / self.ranks.size).to(rows.dtype).view(parameter.shape)
        if parameter.grad is None:
            return torch.empty_like(parameter).copy_(mean)
        return parameter.grad.copy_(mean)

    @classmethod
    def cost(cls, config: PlainConfig, model: ModelSpec, run: Run) -> Cost:
        """Return the bytes of the formula in the package's docstring."""
        size = run.mesh["dp"].size
        gathered = sum(
            sent_elements("all_gather", size * (spec.numel + 1), size=size) * spec.dtype.itemsize
            for spec in model.parameters
            if spec.trainable
        )
        buffers = sum(spec.nbytes for spec in model.buffers)
        broadcast = sent_elements("broadcast", buffers, size=size)
        return cls.whole(model, {("dp", "all_gather"): gathered, ("dp", "broadcast"): broadcast})


# --- the definition of data parallelism, without an optimisation ---

__all__ = ["Plain"]
