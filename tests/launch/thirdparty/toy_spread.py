"""A stranger's strategy: averages each gradient after backward, nothing hidden, nothing fast."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.config import option
from drivetrain.cost import Cost, ModelSpec
from drivetrain.parallel.replicated import WholeGradients
from drivetrain.saved_state import ReplicatedState
from drivetrain.strategy import Prepared, Run, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig:
    flavor: Literal["plain", "salted"] = option(
        "plain", help="How it tastes.", question="Which flavor?"
    )
    spoons: int = option(
        2, help="Spoons per bowl.", question="How many spoons?", minimum=1, maximum=9
    )
    hidden: float = option(0.5, help="A knob that the wizard leaves alone.")


class Toy(Strategy[ToyConfig]):
    summary = "averages each gradient by itself"
    Config = ToyConfig

    @classmethod
    def axes(cls, config: ToyConfig, world_size: int) -> Mapping[str, int]:
        return {"dp": world_size}

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        axis = self.run.mesh["dp"]
        self.gradients = WholeGradients(model.parameters())
        self.state = ReplicatedState(model, optimizers, axis.rank, axis.size)
        return Prepared(model, tuple(optimizers))

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)
        axis = self.run.mesh["dp"]
        for gradient in self.gradients():
            if axis.group is not None:
                dist.all_reduce(gradient, group=axis.group)
                gradient.div_(axis.size)

    @classmethod
    def cost(cls, config: ToyConfig, model: ModelSpec, run: Run) -> Cost:
        size = sum(spec.nbytes for spec in model.parameters)
        ranks = run.mesh["dp"].size
        return Cost(
            held={"parameters": size, "gradients": size, "optimizer": model.states * size},
            sent={("dp", "all_reduce"): 2 * size * (ranks - 1) // ranks},
        )
