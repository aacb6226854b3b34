"""The strategy ``plain``: gathers and averages gradients parameter by parameter, in rank order."""

import torch
from torch import Tensor, nn

from drivetrain.collectives import sent_elements
from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import UsageError
from drivetrain.parallel.replicated import ReplicatedStrategy
from drivetrain.strategy import Run
from drivetrain_plain import PlainConfig, PlainOutline


class Plain(PlainOutline, ReplicatedStrategy[PlainConfig]):
    """Whole models over the mesh axis ``dp``; one object per prepared model."""

    def average(self) -> None:
        """Average the gradient of one parameter after the other."""
        for parameter in self.parameters:
            if parameter in self.hooked:
                parameter.grad = self._mean(parameter)

    def _mean(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the mean of a parameter's gradients over the ranks; None where no rank has one.

        Raises:
            UsageError: the gradient is sparse.
        """
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise UsageError(
                f"expected dense gradients, found {parameter.grad.layout} of a parameter of shape "
                f"{tuple(parameter.shape)}; use sparse=False for embeddings"
            )
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
