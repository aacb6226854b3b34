"""What all checks stand on: the strategy under test, and the same training by one process."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from drivetrain import Accelerator
from drivetrain.testing.models import CASES, Case

MakeOptimizer: TypeAlias = Callable[[nn.Module], Optimizer]

_EXACT = 1e-10
_ROUNDED = 2e-2
"""For models with bf16 inside: the order of additions shows in the third digit."""


def plain_sgd(model: nn.Module) -> Optimizer:
    """Return an optimizer whose step subtracts exactly the gradient."""
    return SGD(model.parameters(), lr=1.0)


def momentum(model: nn.Module) -> Optimizer:
    """Return SGD with momentum."""
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    """Return AdamW, without decay: whether an unused parameter decays is tested by itself."""
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


class Twins:
    """A model trained by the strategy and its twin trained in this process alone.

    The twin's gradient is the mean over ranks of the gradients of their mean losses; every method
    does the same to both and keeps them comparable.

    Args:
        accelerator: trains the one.
        case: the model, its batches and its loss.
        make_optimizer: makes the optimizer of either.
        wrap: a change of the model before ``prepare``, for example ``torch.compile``.
        make_scheduler: makes the scheduler of either from its optimizer.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        case: Case,
        make_optimizer: MakeOptimizer = momentum,
        *,
        wrap: Callable[[nn.Module], Any] | None = None,
        make_scheduler: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.case = case
        self.axis = accelerator.mesh["dp"]
        self.twin = case.build()
        self.twin_optimizer = make_optimizer(self.twin)
        self.twin_scheduler = make_scheduler(self.twin_optimizer) if make_scheduler else None
        built = case.build()
        optimizer = make_optimizer(built)
        scheduler = make_scheduler(optimizer) if make_scheduler else None
        self.model, self.optimizer, self.scheduler = accelerator.prepare(
            wrap(built) if wrap else built, optimizer, scheduler
        )
        rounded = any(p.dtype is torch.bfloat16 for p in self.twin.parameters())
        self.tolerance = _ROUNDED if rounded else _EXACT

    def loss(self, step: int) -> Tensor:
        """Return this rank's loss of the prepared model."""
        loss = self.case.loss(self.model, self.case.batch(step, self.axis.rank))
        theirs = self.case.loss(self.twin, self.case.batch(step, self.axis.rank))
        self._compare("the loss", loss, theirs)
        return loss

    def backward(self, step: int) -> None:
        """Run forward and backward on both, and compare the losses.

        Only afterwards: where a model is cut into stages, backward brings the loss to all of them.
        """
        batch = self.case.batch(step, self.axis.rank)
        loss = self.case.loss(self.model, batch)
        self.accelerator.backward(loss)
        self._compare("the loss", loss, self.case.loss(self.twin, batch))
        self.backward_twin(step)

    def train_alone(self, first: int, last: int) -> None:
        """Run these steps on the prepared model, and not on the twin."""
        for step in range(first, last):
            batch = self.case.batch(step, self.axis.rank)
            self.accelerator.backward(self.case.loss(self.model, batch))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward_twin(self, step: int, *, without: int | None = None) -> None:
        """Run the twin on the batches of all ranks, or of all but one."""
        for rank in range(self.axis.size):
            if rank != without:
                loss = self.case.loss(self.twin, self.case.batch(step, rank))
                torch.autograd.backward(loss / self.axis.size)

    def step(self, *, set_to_none: bool = True) -> None:
        """Update both and clear the gradients of both."""
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.step()
        for scheduler in (self.scheduler, self.twin_scheduler):
            if scheduler is not None:
                scheduler.step()
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.zero_grad(set_to_none=set_to_none)

    def check(self) -> None:
        """Raise when the weights differ from the twin's in name, shape, dtype or value."""
        ours = weights(self.accelerator, self.model)
        theirs = dict(self.twin.named_parameters())
        assert list(ours) == list(theirs), f"names differ: {list(ours)} != {list(theirs)}"
        for name, tensor in ours.items():
            self._compare(name, tensor, theirs[name].detach())

    def _compare(self, what: str, ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=self.tolerance,
            atol=self.tolerance,
            msg=lambda text: f"{what} differs from one process on the same data\n{text}",
        )


def weights(accelerator: Accelerator, model: nn.Module) -> Mapping[str, Tensor]:
    """Return copies of the whole parameters of a prepared model, by the user's names.

    A stage of a pipeline has some of them: the others' come from the ranks that have them.
    """
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    with accelerator.strategy_of(model).gathered(list(inner.parameters())):
        mine = {name: p.detach().clone() for name, p in inner.named_parameters()}
    stages = accelerator.mesh.get("pp")
    if stages is None or stages.size == 1:
        return mine
    return {name: tensor for theirs in everyone(mine) for name, tensor in theirs.items()}


def everyone(value: Any) -> list[Any]:
    """Return the values of all ranks, sent past the strategy and its ledger."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Suite:
    """The ground of the conformance class.

    Attributes:
        strategy: the name of the strategy, or its name and options.
        worlds: the numbers of ranks it is tested on.
        cases: the awkward models, by name, of the checks that train all of them.
        timeout_s: seconds that one check may take.
        rounding: largest relative error of a first loss in a low dtype: the order of additions, or,
            for a strategy whose ranks add parts of a sum in that dtype, its precision.
        inner_axes: mesh axes whose ranks share one replica, and send no gradients over them.
    """

    strategy: ClassVar[str | Mapping[str, Any]]
    worlds: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    cases: ClassVar[Mapping[str, Case]] = CASES
    timeout_s: ClassVar[float] = 300.0
    rounding: ClassVar[float] = 1e-6
    inner_axes: ClassVar[Collection[str]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every check on every world."""
        if "world" in metafunc.fixturenames:
            metafunc.parametrize(
                "world",
                [
                    pytest.param(
                        n, marks=pytest.mark.ranks(n, timeout=self.timeout_s), id=f"ranks{n}"
                    )
                    for n in self.worlds
                ],
            )

    def models(self, *names: str) -> Sequence[Case]:
        """Return the models of these names; if ``cases`` has none of them, all that it has."""
        return [self.cases[name] for name in names if name in self.cases] or [*self.cases.values()]

    @contextmanager
    def accelerator(self, **options: Any) -> Iterator[Accelerator]:
        """Return an Accelerator with the strategy under test, taken off at the end.

        After an error the Accelerator is left alone: the processes end, and taking the strategy off
        could wait for ranks that are gone.
        """
        accelerator = self.make_accelerator(**options)
        yield accelerator
        accelerator.free_memory()

    def make_accelerator(self, **options: Any) -> Accelerator:
        """Return an Accelerator with the strategy under test."""
        return Accelerator(strategy=self.strategy, cpu=True, **options)

    def reduced_bytes(self, accelerator: Accelerator) -> int:
        """Return the bytes of reductions so far; gathers of parameters are not about gradients."""
        sent = accelerator.traffic.sent()
        return sum(
            count
            for (axis, operation), count in sent.items()
            if operation != "all_gather" and axis not in self.inner_axes
        )
