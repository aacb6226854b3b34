"""Loops: k steps on many ranks are k steps of one process, for awkward models and users' loops."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.testing.conformance.accounts import reduces_each
from drivetrain.testing.conformance.suite import Suite
from drivetrain.testing.conformance.twins import (
    Twins,
    adamw,
    everyone,
    momentum,
    plain_sgd,
    weights,
)
from drivetrain.testing.models import CASES, OUT, WIDTH, Case

MLP = CASES["mlp"]
STEPS = 2
WINDOW = 3


class LoopChecks(Suite):
    """Plain steps, accumulation, clipping, and the ordinary ways in which loops differ."""

    def test_accumulation_with_a_partial_window(self, world: int) -> None:
        """Windows of 3 and 2 micro-batches are two means; only who says so sends inside them."""
        with self.accelerator(gradient_accumulation_steps=WINDOW) as accelerator:
            twins = Twins(accelerator, self.models("mlp")[0])
            loader = accelerator.prepare(_loader(twins.axis.size, batches=5))
            lengths, window = [], []
            for inputs, targets in loader:
                window.append((inputs, targets))
                with accelerator.accumulate(twins.model):
                    loss = F.mse_loss(twins.model(inputs), targets)
                    before = self.reduced_bytes(accelerator)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        _backward_window(twins, window)
                        lengths.append(len(window))
                        window = []
                        twins.step()
                    else:
                        sent = self.reduced_bytes(accelerator) - before
                        assert sent == 0 or reduces_each(twins), (
                            f"{sent} bytes of gradient sent inside the window"
                        )
                        twins.optimizer.step()
                        twins.optimizer.zero_grad()
            assert lengths == [WINDOW, 2]
            twins.check()

    def test_clipping_by_the_global_norm(self, world: int) -> None:
        """The norm is of the whole model, on every rank; the step uses clipped gradients."""
        with self.accelerator() as accelerator:
            for case in self.models("mlp", "tied", "odd_shapes", "adapted"):
                twins = Twins(accelerator, case)
                for step, norm_type in enumerate((2.0, float("inf"))):
                    twins.backward(step)
                    norm = accelerator.clip_grad_norm_(twins.model.parameters(), 0.01, norm_type)
                    filled = [p for p in twins.twin.parameters() if p.numel()]  # torch: no max of 0
                    expected = nn.utils.clip_grad_norm_(filled, 0.01, norm_type)
                    assert norm is not None
                    torch.testing.assert_close(norm.double(), expected, rtol=1e-9, atol=0.0)
                    assert len(set(everyone(norm.item()))) == 1, "ranks have different norms"
                    twins.step()
                    twins.check()
                accelerator.free_memory()

    def test_backward_more_than_once(self, world: int) -> None:
        """Two losses, one loss of two forwards, one graph twice, gradients cleared to zeros."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, MLP)
            for step in (0, 1):
                twins.backward(step)
            twins.step(set_to_none=False)
            accelerator.backward(twins.loss(2) + twins.loss(3))
            for step in (2, 3):
                twins.backward_twin(step)
            twins.step(set_to_none=False)
            loss = twins.loss(4)
            accelerator.backward(loss, retain_graph=True)
            accelerator.backward(loss)
            for _ in range(2):
                twins.backward_twin(4)
            twins.step()
            twins.check()

    def test_backward_by_the_user(self, world: int) -> None:
        """``loss.backward()`` does the same as ``accelerator.backward(loss)``."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, MLP)
            for step in range(2):
                twins.loss(step).backward()  # type: ignore[no-untyped-call]
                twins.backward_twin(step)
                twins.step()
            twins.check()

    def test_evaluation_between_steps(self, world: int) -> None:
        """Forwards without gradients, first and in between, change nothing."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, CASES["batchnorm"])
            together = accelerator.strategy_of(twins.model).pace.forwards
            for step in range(3):
                twins.model.eval()
                with torch.no_grad():
                    for _ in range(2 if together else 1 + twins.axis.rank):
                        twins.case.loss(twins.model, twins.case.batch(99, 0))
                twins.model.train()
                twins.backward(step)
                twins.step()
            twins.check()

    def test_evaluation_is_the_same_on_every_rank(self, world: int) -> None:
        """After windows of steps all ranks evaluate with the buffers that a checkpoint holds."""
        with self.accelerator(gradient_accumulation_steps=2) as accelerator:
            twins = Twins(accelerator, CASES["batchnorm"])
            for step in range(4):
                with accelerator.accumulate(twins.model):
                    batch = twins.case.batch(step, twins.axis.rank)
                    accelerator.backward(twins.case.loss(twins.model, batch))
                    twins.optimizer.step()
                    twins.optimizer.zero_grad()
                with torch.no_grad():
                    twins.model.eval()
                    loss = twins.case.loss(twins.model, twins.case.batch(99, 0))
                    twins.model.train()
                if accelerator.sync_gradients:
                    losses = everyone(float(loss))
                    assert losses == losses[:1] * world, f"losses of the ranks differ: {losses}"

    def test_gradients_can_be_changed_before_the_step(self, world: int) -> None:
        """``gradients()`` yields the tensors that the optimizer reads, each element once a rank."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, CASES["tied"])
            twins.backward(0)
            for piece in accelerator.strategy_of(twins.model).gradients():
                piece.mul_(0.5)
            for parameter in twins.twin.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            twins.step()
            twins.check()

    def test_optimizers_over_groups_and_subsets(self, world: int) -> None:
        """Groups with their own rates and decay, a schedule, and parameters that no one trains."""

        def groups(model: nn.Module) -> Optimizer:
            matrices = [p for p in model.parameters() if p.dim() > 1]
            vectors = [p for p in model.parameters() if p.dim() == 1]
            return SGD(
                [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.2}], lr=0.05
            )

        def subset(model: nn.Module) -> Optimizer:
            return adamw(list(model.children())[-1])

        def halving(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

        for make_optimizer in (groups, subset):
            with self.accelerator() as accelerator:
                twins = Twins(accelerator, MLP, make_optimizer, make_scheduler=halving)
                for step in range(3):
                    twins.backward(step)
                    twins.step()
                twins.check()

    def test_loss_that_misses_the_model_on_one_rank(self, world: int) -> None:
        """The rank's gradients count as zeros, and no rank waits for them."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, MLP)
            together = accelerator.strategy_of(twins.model).pace.forwards
            absent = twins.axis.size - 1
            for step in range(0 if together else 2):
                if twins.axis.rank == absent:
                    accelerator.backward(torch.zeros((), dtype=torch.float64, requires_grad=True))
                else:
                    accelerator.backward(twins.loss(step))
                twins.backward_twin(step, without=absent)
                twins.step()
            twins.check()
        if together:
            pytest.skip("ranks need each other in every forward and backward")

    def test_compiled_model(self, world: int) -> None:
        """A model compiled before ``prepare`` trains the same and keeps its names."""
        with self.accelerator() as accelerator:
            compiled = Twins(
                accelerator, MLP, wrap=lambda model: torch.compile(model, backend="aot_eager")
            )
            for step in range(2):
                compiled.backward(step)
                compiled.step()
            compiled.check()

    def test_training_equals_one_process(self, world: int) -> None:
        """Of every awkward model: losses, and weights that show the size of gradients."""
        with self.accelerator() as accelerator:
            for case in self.cases.values():
                try:
                    _equals_one_process(accelerator, case)
                except Exception as error:
                    error.add_note(f"while training the model {case.name!r}")
                    raise
                accelerator.free_memory()

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


def _equals_one_process(accelerator: Accelerator, case: Case) -> None:
    """Train a model by an optimizer with states; a large one takes a step without any."""
    twins = Twins(accelerator, case, plain_sgd if case.large else _adam_by_size)
    for step in range(1 if case.large else STEPS):
        twins.backward(step)
        twins.step()
    twins.check()


def _adam_by_size(model: nn.Module) -> Optimizer:
    """Return AdamW whose steps are the longer the larger gradients are: a wrong mean shows."""
    return AdamW(model.parameters(), lr=0.5, eps=1.0, weight_decay=0.0)


def _loader(ranks: int, *, batches: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    rows = 2 * ranks * batches
    data = TensorDataset(
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        torch.randn(rows, OUT, generator=generator, dtype=torch.float64),
    )
    return DataLoader(data, batch_size=2)


def _backward_window(twins: Twins, window: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Run the twin on the window of every rank: the mean over micro-batches and ranks."""
    windows = everyone(window)
    for inputs, targets in [batch for each in windows for batch in each]:
        loss = F.mse_loss(twins.twin(inputs), targets)
        torch.autograd.backward(loss / (len(window) * len(windows)))


# --- several models in one Accelerator, several Accelerators in one process, and taking one off ---


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
            divided = accelerator.strategy_of(twins.model).pace.forwards
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
