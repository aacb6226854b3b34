"""A model over cells of ranks, and the same in one process."""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator
from huggingface_models import logits_of
from staged_twins import EXACT, compare_gradients


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(model(ids)).flatten(0, 1), ids.flatten())


class Twins:
    """Both take the same steps; ``trained`` chooses what the optimizers hold.

    ``loss`` makes the loss of either of what ``backward`` gets.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        accumulation: int = 1,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
        trained: Callable[[Iterable[Tensor]], list[Tensor]] = list,
        loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
        **options: object,
    ) -> None:
        self.twin, self.loss = copy.deepcopy(model), loss
        self.accelerator = Accelerator(
            strategy={"name": "megatron", **options},
            gradient_accumulation_steps=accumulation,
            cpu=True,
        )
        self.other = optimizer(trained(self.twin.parameters()), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(
            model, optimizer(trained(model.parameters()), lr=0.1)
        )

    def backward(self, *batches: Tensor) -> None:
        """Run backward of one batch for each replica."""
        axis = self.accelerator.mesh["dp"]
        loss = self.loss(self.model, batches[axis.rank])
        self.accelerator.backward(loss)
        theirs = [self.loss(self.twin, ids) for ids in batches]
        torch.stack(theirs).mean().backward()
        torch.testing.assert_close(loss.item(), theirs[axis.rank].item(), rtol=1e-6, atol=0)

    def train(self, *batches: Tensor) -> None:
        """Take a step on each batch; compare gradients, and the weights at the end."""
        for batch in batches:
            self.backward(batch)
            self.check_gradients()
            self.step()
        self.check_weights()

    @property
    def divided(self) -> set[str]:
        """The names of the parameters of which this rank has a part."""
        facts = self.accelerator.strategy_of(self.model)._facts
        return {name for name, known in facts.items() if known.partition is not None}

    def clip(self, most: float, p: float = 2.0, names: set[str] | None = None) -> Tensor:
        """Clip the gradients of both by the norm of those named, and return it."""
        mine, theirs = (
            [v for n, v in model.named_parameters() if names is None or n in names]
            for model in (self.model, self.twin)
        )
        found = self.accelerator.clip_grad_norm_(mine, most, p)
        expected = nn.utils.clip_grad_norm_(theirs, most, p)
        torch.testing.assert_close(found, expected, **EXACT, check_dtype=False)
        return found

    def step(self) -> None:
        for optimizer in (self.optimizer, self.other):
            optimizer.step()
            optimizer.zero_grad()

    def check_gradients(self, **tolerance: float) -> None:
        compare_gradients(self.model, self.twin, **{**EXACT, **tolerance})

    def check_weights(self, **tolerance: float) -> None:
        found = self.accelerator.get_state_dict(self.model)
        torch.testing.assert_close(found, self.twin.state_dict(), **{**EXACT, **tolerance})

    def close(self) -> None:
        self.accelerator.free_memory()
