"""Gradients from the loss to the optimizer: accumulated, averaged, unscaled, clipped.

The gradient of an accumulation window is the mean that one large batch would have given. Every
micro-batch's loss is divided by the configured number of micro-batches. A window that ends early is
put right once, when its last gradients are synchronised. With weights (tokens, say) the losses are
multiplied by them, and the sum over micro-batches *and* ranks divides at the end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import communication
from drivetrain.errors import UsageError
from drivetrain.facade.observer import Observer
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.facade.settings import Runs
from drivetrain.parts.norms import clip_
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.scaler import LossScaler


class WindowMean:
    """The normalisation of one accumulation window.

    Args:
        state: the window it belongs to.
        counted: whether the micro-batches are counted by ``accumulate()``; a loop that counts them
            itself always has full windows.
    """

    def __init__(self, state: GradientState, *, counted: bool) -> None:
        self._state = state
        self._counted = counted
        self._weights: list[float] = []
        self._unweighted = False
        self._finished = False

    def divide(self, loss: Tensor, weight: float | Tensor | None) -> Tensor:
        """Return the loss as it enters backward: weighted, or a share of the window's mean.

        Raises:
            UsageError: weighted and unweighted losses in one window, or a weighted loss after the
                window was finished.
        """
        if weight is None:
            self._unweighted = True
        else:
            self._weights.append(float(weight))
        if self._weights and self._unweighted:
            raise UsageError(
                "expected a weight for every loss of an accumulation window or for none, found "
                "both; pass weight= to each backward() of the window"
            )
        if weight is None:
            length = self._state.window_length if self._finished else self._state.num_steps
            return loss / length if length > 1 else loss
        if self._finished or (self._state.num_steps > 1 and not self._counted):
            raise UsageError(
                "expected one weighted backward() per micro-batch inside accumulate(), found one "
                "after the window's gradients were already divided by the sum of weights; add the "
                "losses before backward(), and use 'with accelerator.accumulate(model):'"
            )
        return loss * weight

    def finish(self, axis: Axis, device: torch.device) -> float | None:
        """Return the factor that makes the synchronised gradients right, None when they are.

        Collective over the axis when the losses are weighted.
        """
        if self._finished:
            return None
        if self._weights:
            self._finished = True
            # In fp64: sums of token counts stay exact.
            total = torch.tensor(sum(self._weights), dtype=torch.float64, device=device)
            whole = float(communication.reduce(total, "sum", group=axis))
            # The strategy has averaged over the axis: its size turns the mean into a sum again.
            return axis.size / whole if whole else 0.0
        length = self._state.window_length
        if not self._counted or length >= self._state.num_steps:
            return None
        self._finished = True
        return self._state.num_steps / length


class WindowGradients:
    """The gradients of all prepared models in one accumulation window.

    Args:
        prepared: the models and their optimizers.
        state: the accumulation window.
        scaler: the loss scale of fp16.
        runs: gradients are averaged over the axis ``dp`` of the default one.

    Attributes:
        step: micro-batch of the window, from 1; kept in checkpoints.
        observer: is told of each event.
    """

    def __init__(
        self, prepared: PreparedObjects, state: GradientState, scaler: LossScaler, runs: Runs
    ) -> None:
        self.state = state
        self.scaler = scaler
        self.step = 0
        self.observer = Observer()
        self._prepared = prepared
        self._runs = runs
        self._mean = WindowMean(state, counted=False)

    @contextmanager
    def micro_batch(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Context of one micro-batch of these models; of all models when there are none."""
        state = self.state
        if state.sync_gradients:
            self._mean = WindowMean(state, counted=True)
        state.next_micro_batch()
        self.step = state.micro_batch
        if state.sync_gradients or state.sync_each_batch:
            yield
        else:
            with ExitStack() as stack:
                for entry in self._prepared.chosen(models):
                    stack.enter_context(entry.strategy.accumulating())
                yield
        if state.sync_gradients:
            self.scaler.update()

    def loss_of(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor] | None,
    ) -> Tensor:
        """Return the loss of a batch, which ``backward`` is given next; see ``pipeline_step``."""
        entry = self._prepared.model(model)
        args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (args, {})
        if loss_fn is None:
            output = model(*args, **kwargs)
            loss: Tensor = (
                output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
            )
            return loss
        self.observer.handed_over(args, kwargs, targets)
        loss = entry.strategy.loss(entry.model, args, kwargs, targets, loss_fn)
        # A strategy may run parts of the model only: then the model's own hook has noted nothing.
        self._prepared.last_run = entry
        return loss

    def backward(
        self, loss: Tensor, weight: float | Tensor | None, options: Mapping[str, Any]
    ) -> None:
        """Run backward; at the end of a window the gradients are synchronised and exact means."""
        _check_loss(loss)
        if self.state.micro_batch == 0:
            self._mean = WindowMean(self.state, counted=False)
        scaled = self.scaler.scale(self._mean.divide(loss, weight))
        self._match_scale()
        strategy = self._prepared.running().strategy
        strategy.backward(scaled, **options)
        strategy.publish(loss)
        self.observer.after_backward(loss, weight)
        if self.state.sync_gradients:
            run = self._runs.default
            factor = self._mean.finish(run.mesh["dp"], run.world.device)
            if factor is not None:
                for entry in self._prepared.models:
                    entry.strategy.scale_gradients(factor)

    def clip_norm(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float
    ) -> Tensor | None:
        """Scale gradients to a global norm of at most ``max_norm``, and return the norm before."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.state.sync_gradients:
            return None
        entries = self._prepared.owners_of(given)
        for entry in entries:
            self._unscale(entry)
            self.observer.gradients(entry)
        chosen = [_subset(entry, given) for entry in entries]
        if len(entries) == 1:
            return entries[0].strategy.clip_grad_norm(max_norm, norm_type, only=chosen[0])
        # Several models have one norm: it is measured for each, and clips all of them.
        norms = [
            entry.strategy.clip_grad_norm(float("inf"), norm_type, only=only)
            for entry, only in zip(entries, chosen, strict=True)
        ]
        device = self._runs.default.world.device
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(device) for norm in norms]), norm_type
        )
        for entry, only in zip(entries, chosen, strict=True):
            clip_(list(entry.strategy.gradients(only)), total, max_norm)
        return total

    def clip_value(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp gradient elements to [-clip_value, clip_value]."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.state.sync_gradients:
            return
        for entry in self._prepared.owners_of(given):
            self._unscale(entry)
            self.observer.gradients(entry)
            for piece in entry.strategy.gradients(_subset(entry, given)):
                piece.clamp_(-clip_value, clip_value)

    def unscale(self, optimizer: Optimizer | Iterable[Optimizer] | None) -> None:
        """Divide by the loss scale the gradients of these optimizers' models; None means all."""
        if optimizer is None:
            chosen: list[Optimizer] = list(self._prepared.optimizers)
        else:
            chosen = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for each in chosen:
            for entry in self._prepared.trained_by(getattr(each, "optimizer", each)):
                self._unscale(entry)

    def before_step(self, optimizer: Optimizer) -> bool:
        """Unscale gradients that still carry a scale; return whether the step may be taken.

        Raises:
            UsageError: the model has parameters that came after ``prepare``.
        """
        entries = self._prepared.trained_by(optimizer)
        for entry in entries:
            entry.check_parameters()
            self.observer.gradients(entry)
        if not self.scaler.is_enabled():
            return True
        for entry in entries:
            self._unscale(entry)
        bad = [entry.made_with for entry in entries if entry.overflow]
        optimizers = enumerate(self._prepared.optimizers)
        number = next(i for i, each in optimizers if each.optimizer is optimizer)
        self.scaler.record(number, overflow=bool(bad), made_with=min(bad, default=1.0))
        if self.state.micro_batch == 0:  # no accumulate() around the step, which would update it
            self.scaler.update()
        return not bad

    def after_step(self) -> None:
        """Tell the observer that an optimizer has stepped, or left out a step."""
        self.observer.after_step()

    def _match_scale(self) -> None:
        """Bring the gradients at hand to the loss scale of the backward that is about to run.

        They carry another scale when they were unscaled already, or when the scale has changed
        since with the step of another model.
        """
        if not self.scaler.is_enabled():
            return
        scale = self.scaler.get_scale()
        for entry in self._prepared.models:
            if entry.scale not in (None, scale):
                entry.strategy.scale_gradients(scale / entry.scale)
            entry.scale, entry.unscaled = scale, False

    def _unscale(self, entry: PreparedModel) -> None:
        if entry.scale is None or entry.unscaled or not self.scaler.is_enabled():
            return
        world = self._runs.default.world
        entry.overflow = self.scaler.unscale(
            list(entry.strategy.gradients()), entry.scale, ranks=world.size, device=world.device
        )
        entry.made_with, entry.scale, entry.unscaled = entry.scale, 1.0, True


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise UsageError(f"expected the loss as a 0-d tensor, found {type(loss).__name__}")
    if loss.numel() != 1:
        raise UsageError(
            f"expected a scalar loss, found shape {tuple(loss.shape)}; take its mean() or sum() "
            "before backward()"
        )
    if not loss.requires_grad:
        raise UsageError(
            "expected a loss that requires grad, found one that does not; it was computed under "
            "no_grad, detached, or from a model without trainable parameters"
        )


def _subset(entry: PreparedModel, given: list[Tensor]) -> list[nn.Parameter] | None:
    """Return the model's parameters among those given; None when nothing trainable is missing."""
    wanted = {id(parameter) for parameter in given}
    trainable = [parameter for parameter in entry.module.parameters() if parameter.requires_grad]
    chosen = [parameter for parameter in trainable if id(parameter) in wanted]
    return None if len(chosen) == len(trainable) else chosen
