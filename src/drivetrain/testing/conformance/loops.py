"""Loops: k steps on many ranks are k steps of one process, for awkward models, in any precision."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, GradScalerKwargs
from drivetrain.errors import ConfigError, UsageError
from drivetrain.testing.conformance.suite import (
    Suite,
    Twins,
    adamw,
    everyone,
    momentum,
    plain_sgd,
    reduces_each,
    weights,
)
from drivetrain.testing.models import CASES, OUT, WIDTH, Batch, Case, numbers

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
                twins.train_both(0, 3)
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
            compiled.train_both(0, 2)
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
    twins.train_both(0, 1 if case.large else STEPS)
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
                twins.train_both(0, 1)
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
            twins.train_both(0, 1)
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


def autocast_loss(case: Case, dtype: torch.dtype | None, *, copies: bool = False) -> Loss:
    """Return a case's loss with a forward that computes in a dtype; None computes as given.

    Args:
        case: the model and its loss.
        dtype: of autocast.
        copies: whether forward reads copies of matrices in this dtype.
    """

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        given = dict(model.named_parameters())
        read = {name: p.to(dtype) if copies and p.dim() > 1 else p for name, p in given.items()}

        def forward(*inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                outputs: Tensor = torch.func.functional_call(model, read, inputs)
            return outputs

        return case.loss(_Computed(forward), batch)

    return loss


def copies_loss(case: Case, dtype: torch.dtype) -> Loss:
    """Return a case's loss with a forward that reads low copies of matrices, by autocast too."""
    return autocast_loss(case, dtype, copies=True)


def quick_sgd(model: nn.Module) -> Optimizer:
    """Return SGD whose steps are large beside the rounding of weights."""
    return SGD(model.parameters(), lr=0.5, momentum=0.5)


class LowTwins(Twins):
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
        super().__init__(accelerator, case, quick_sgd)
        self._loss = loss
        self._rounding = rounding
        self._start = [p.detach().clone() for p in self.twin.parameters()]

    def train(self, step: int, factors: Sequence[float], *, clip: bool = False) -> None:
        """Run one window and one step on both; the first losses of all must be equal.

        Args:
            step: number of the step.
            factors: of the loss of each micro-batch of the window.
            clip: whether gradients are clipped to ``LIMIT``.
        """
        window = len(factors)
        for i, factor in enumerate(factors):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self._first(step * window + i) * factor)
                if clip:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), LIMIT)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self._backward_scaled(step * window + i, factor / window)
        if clip:
            norm = nn.utils.clip_grad_norm_(self.twin.parameters(), LIMIT)
            assert step > 0 or norm > LIMIT, f"a norm of {norm} is not clipped"
        self.twin_optimizer.step()
        self.twin_optimizer.zero_grad()
        assert not self.accelerator.optimizer_step_was_skipped, "a finite step was skipped"

    def check_moved(self, tolerance: float, *, rounded: float = 0.0) -> None:
        """Raise when the weights are too far from the twin's.

        Args:
            tolerance: allowed error, relative to how far the weights have moved.
            rounded: allowed error on top, relative to the weights.
        """
        ours = weights(self.accelerator, self.model)
        theirs = {name: p.detach() for name, p in self.twin.named_parameters()}
        assert list(ours) == list(theirs), f"names differ: {list(ours)} != {list(theirs)}"
        error = _norm([ours[key].float() - theirs[key] for key in ours])
        moved = _norm([p - s for p, s in zip(theirs.values(), self._start, strict=True)])
        allowed = tolerance * moved + rounded * _norm(list(theirs.values()))
        assert error <= allowed, (
            f"weights that moved by {moved:.3g} differ from one process by {error:.3g}, "
            f"allowed: {allowed:.3g}"
        )

    def _first(self, number: int) -> Tensor:
        batch = self.case.batch(number, self.axis.rank)
        loss = self.case.loss(self.model, batch)
        if number == 0:
            # Same weights, data and roundings: only the order inside a matrix product may differ.
            theirs = self._loss(self.twin, batch)
            allowed = self._rounding
            torch.testing.assert_close(loss, theirs, rtol=allowed, atol=allowed)
        return loss

    def _backward_scaled(self, number: int, factor: float) -> None:
        scale = self.accelerator.scaler.get_scale()
        parameters = list(self.twin.parameters())
        for rank in range(self.axis.size):
            loss = self._loss(self.twin, self.case.batch(number, rank))
            gradients = torch.autograd.grad(loss * (scale * factor), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                share = gradient / (scale * self.axis.size)
                parameter.grad = share if parameter.grad is None else parameter.grad + share


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors])))


# --- the checks ---


ROUNDED_STEPS = 3
SCALE = 1024.0
LOW = torch.bfloat16

_COMPUTE = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_TOLERANCE = {"no": 1e-5, "bf16": 2e-2, "fp16": 4e-3}
"""Error of the weights, relative to how far they moved.

Ranks add their gradients in another order than one process: that shows in the last bit of fp32,
6e-8 of a number, over a hundred additions. From the second step on such a bit can tip an activation
to its neighbor in the low dtype, by 2**-8 of it in bf16 and by 2**-11 in fp16, in a few layers.
"""
_ROUNDED = 2.0**-8
"""Largest error of a weight that is read in bf16, relative to the weight."""


class PrecisionChecks(Suite):
    """Low precision against one process that rounds at the same places."""

    @pytest.mark.parametrize("precision", list(_COMPUTE))
    def test_precision_equals_one_process(self, world: int, precision: str) -> None:
        """Three steps, with and without accumulation and clipping."""
        for window in (1, 2):
            with self.accelerator(**_options(precision, window)) as accelerator:
                for name, clip in (("mlp", window == 2), ("tied", window == 1)):
                    case = in_fp32(CASES[name])
                    loss = autocast_loss(case, _COMPUTE[precision])
                    twins = LowTwins(accelerator, case, loss, rounding=self.rounding)
                    for step in range(ROUNDED_STEPS):
                        twins.train(step, [1.0] * window, clip=clip)
                    twins.check_moved(_TOLERANCE[precision])
                    accelerator.free_memory()

    @pytest.mark.parametrize("precision", list(_COMPUTE))
    def test_dtypes_under_a_precision(self, world: int, precision: str) -> None:
        """Layers compute low, outputs are fp32, norms and integer buffers keep their dtype."""
        case = in_fp32(CASES["batchnorm"])
        with self.accelerator(**_options(precision, 1)) as accelerator:
            built = case.build()
            given = _dtypes(built)
            model, optimizer = accelerator.prepare(built, quick_sgd(built))
            inner = accelerator.unwrap_model(model)
            seen: list[torch.dtype] = []
            layer = next(m for m in inner.modules() if isinstance(m, nn.Linear))
            layer.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
            batch = case.batch(0, accelerator.mesh["dp"].rank)
            assert model(batch.inputs).dtype is torch.float32, "outputs are not fp32"
            assert seen == [_COMPUTE[precision] or torch.float32], f"a layer computed in {seen}"
            accelerator.backward(case.loss(model, batch))
            optimizer.step()
            assert _dtypes(inner) == given, "parameters or buffers changed their dtype"

    def test_infinite_gradient_on_one_rank(self, world: int) -> None:
        """All ranks skip the step: weights, moments and schedule stay, and the scale is agreed."""
        for window in (1, 2):
            with self.accelerator(**_options("fp16", window)) as accelerator:
                loop = _Fp16Loop(accelerator, window)
                loop.train(0)
                before, rate = loop.state(), loop.scheduler.get_last_lr()
                last = accelerator.process_index == accelerator.num_processes - 1
                loop.train(1, float("inf") if last else 1.0)
                after = loop.state()
                assert set(everyone(accelerator.optimizer_step_was_skipped)) == {True}
                for key, tensor in before.items():
                    assert torch.equal(after[key], tensor), f"the skipped step changed {key}"
                assert loop.scheduler.get_last_lr() == rate, "the skipped step moved the schedule"
                assert set(everyone(accelerator.scaler.get_scale())) == {SCALE / 2}
                loop.train(2)
                assert set(everyone(accelerator.optimizer_step_was_skipped)) == {False}
                for key, tensor in weights(accelerator, loop.model).items():
                    assert tensor.isfinite().all(), f"{key} is not finite after a skipped step"
                    assert not torch.equal(tensor, before[key]), f"{key} no longer moves"

    def test_low_parameters_have_masters(self, world: int) -> None:
        """``dtypes.param: bf16`` reads bf16 copies and updates fp32 masters, or is refused."""
        for name, window in (("mlp", 1), ("tied", 2)):
            case = in_fp32(CASES[name])
            with self.accelerator(**_options("bf16", window, param="bf16")) as accelerator:
                twins = self._prepared(accelerator, case, copies_loss(case, LOW), "param")
                if twins is None:
                    return
                for step in range(ROUNDED_STEPS):
                    twins.train(step, [1.0] * window)
                twins.check_moved(_TOLERANCE["bf16"], rounded=_ROUNDED)

    def test_masters_keep_small_updates(self, world: int) -> None:
        """Updates too small for a bf16 weight to see add up in its master."""
        case = in_fp32(CASES["mlp"])
        with self.accelerator(**_options("bf16", 1, param="bf16")) as accelerator:
            twins = self._prepared(accelerator, case, copies_loss(case, LOW), "param")
            if twins is not None:
                for step in range(48):
                    twins.train(step, [2.0**-8])
                twins.check_moved(_TOLERANCE["bf16"], rounded=_ROUNDED)

    def test_low_gradients_are_added_up_in_fp32(self, world: int) -> None:
        """A large gradient and then 63 small ones, each of which alone bf16 would lose."""
        plain = in_fp32(CASES["mlp"])
        case = replace(plain, batch=lambda step, rank: plain.batch(0, rank))
        with self.accelerator(**_options("bf16", 64, param="bf16")) as accelerator:
            twins = self._prepared(accelerator, case, copies_loss(case, LOW), "param")
            if twins is not None:
                twins.train(0, [64.0] + [64 * 2.0**-9] * 63)
                twins.check_moved(_TOLERANCE["bf16"], rounded=_ROUNDED)

    def test_dtype_on_the_wire(self, world: int) -> None:
        """``dtypes.reduce: bf16`` halves the bytes of gradients, or is refused."""
        case, sent = in_fp32(CASES["mlp"]), []
        for dtypes in ({"reduce": "bf16"}, {}):
            with self.accelerator(**_options("bf16", 1, **dtypes)) as accelerator:
                twins = self._prepared(accelerator, case, autocast_loss(case, LOW), "reduce")
                if twins is None:
                    return
                before = self.reduced_bytes(accelerator)
                twins.train(0, [1.0])
                sent.append(self.reduced_bytes(accelerator) - before)
                twins.check_moved(_TOLERANCE["bf16"])
        assert sent[0] <= 0.6 * sent[1], f"{sent[0]} bytes of gradients in bf16, {sent[1]} in fp32"

    def _prepared(
        self, accelerator: Accelerator, case: Case, loss: Loss, key: str
    ) -> LowTwins | None:
        """Prepare both, or return None when the strategy refuses a dtype."""
        try:
            return LowTwins(accelerator, case, loss, rounding=self.rounding)
        except ConfigError as error:
            if f"dtypes.{key}" not in str(error):
                raise
            return None


class _Apart(nn.Module):
    """Two layers side by side: an infinite gradient of one output is that of a few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, OUT)
        self.other = nn.Linear(WIDTH, OUT)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (rows, width) to (rows, 2 out)."""
        return torch.cat([self.one(inputs), self.other(inputs)], dim=1)


class _Fp16Loop:
    """AdamW with a schedule over one model, and the state that a skipped step must not touch."""

    def __init__(self, accelerator: Accelerator, window: int) -> None:
        self._accelerator = accelerator
        self._window = window
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(17)
            built = _Apart()
        optimizer = AdamW(built.parameters(), lr=0.01)
        schedule = StepLR(optimizer, step_size=1, gamma=0.5)
        self.model, self.optimizer, self.scheduler = accelerator.prepare(built, optimizer, schedule)

    def train(self, step: int, factor: float = 1.0) -> None:
        """Run one window; in its first micro-batch one output counts by the factor."""
        for i in range(self._window):
            batch = numbers(step * self._window + i, self._accelerator.mesh["dp"].rank)
            with self._accelerator.accumulate(self.model):
                outputs = self.model(batch.inputs.float())
                one = outputs[:, 0].mean() * (factor if i == 0 else 1.0)
                self._accelerator.backward(one + outputs[:, 1:].square().mean())
                self._accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def state(self) -> Mapping[str, Tensor]:
        """Return copies of the weights and of the optimizer's state on this rank."""
        kept = {
            f"{i}.{key}": value.detach().clone()
            for i, state in enumerate(self.optimizer.state.values())
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        return {**weights(self._accelerator, self.model), **kept}


def _options(precision: str, window: int, **dtypes: str) -> dict[str, Any]:
    return {
        "mixed_precision": precision,
        "gradient_accumulation_steps": window,
        "kwargs_handlers": [GradScalerKwargs(init_scale=SCALE)],
        "config": {"dtypes": dtypes},
    }


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.dtype for name, tensor in tensors}
