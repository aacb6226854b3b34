"""The verbs of the training step: accumulate, backward, clip, and what belongs between them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.errors import UsageError
from drivetrain.facade.core import ModelEntry
from drivetrain.facade.options import AutocastKwargs, ProfileKwargs
from drivetrain.facade.scaling import Scaling
from drivetrain.facade.window import WindowMean
from drivetrain.parts.norms import clip_
from drivetrain.strategy import Strategy


class Training(Scaling):
    """The training step of the Accelerator."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch at hand ends the accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; may be changed between steps."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if value < 1:
            raise UsageError(f"expected gradient_accumulation_steps of at least 1, found {value}")
        self.gradient_state.num_steps = value

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Context of one micro-batch.

        Inside, optimizer and scheduler do nothing and gradients stay local until the window is
        complete: after ``gradient_accumulation_steps`` micro-batches or at the end of the loader.

        Args:
            models: the models that accumulate; none means all that were prepared.
        """
        state = self.gradient_state
        if state.sync_gradients:
            self._window = WindowMean(state, counted=True)
        state.next_micro_batch()
        self.step = state.micro_batch
        if state.sync_gradients or state.sync_each_batch:
            yield
        else:
            with ExitStack() as stack:
                for entry in self._entries_of(models):
                    stack.enter_context(entry.strategy.accumulating())
                yield
        if state.sync_gradients:
            self.scaler.update()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which backward keeps this model's gradients local."""
        return self._entry_of(model).strategy.accumulating()

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context inside ``no_sync`` in which backward synchronises after all."""
        return self._entry_of(model).strategy.accumulating(False)

    def backward(
        self, loss: Tensor, *, weight: float | Tensor | None = None, **options: Any
    ) -> None:
        """Run backward; at the end of a window the gradients are synchronised and exact means.

        Args:
            loss: 0-d, the mean over this rank's micro-batch.
            weight: what this micro-batch counts for among all micro-batches of the window and all
                ranks, for example its number of tokens; None for all alike.
            options: those of ``Tensor.backward``, for example ``retain_graph=True``.

        Raises:
            UsageError: the loss is not a 0-d tensor that requires grad.
        """
        _check_loss(loss)
        if self.gradient_state.micro_batch == 0:
            self._window = WindowMean(self.gradient_state, counted=False)
        scaled = self.scaler.scale(self._window.divide(loss, weight))
        self._note_scale()
        owner = self._owner()
        owner.backward(scaled, **options)
        owner.publish(loss)
        if self.sync_gradients:
            factor = self._window.finish(self.mesh["dp"], self.device)
            if factor is not None:
                for entry in self._entries:
                    entry.strategy.scale_gradients(factor)

    def pipeline_step(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any = None,
        *,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        weight: float | Tensor | None = None,
    ) -> Tensor:
        """Run forward and backward of a batch, in whatever order the strategy is fastest with.

        The same loop works under every strategy; a pipeline may use any schedule, since it has the
        whole batch at once.

        Args:
            model: a prepared model.
            inputs: a mapping of inputs by name, a tuple of positional ones, or one tensor.
            targets: the second argument of the loss function; cut into micro-batches as inputs are.
            loss_fn: of (output, targets), the mean over the rows; None where the model returns its
                loss.
            weight: what this batch counts for, see ``backward``.

        Returns:
            The loss, 0-d, detached, with its value on every rank.
        """
        entry = self._entry_of(model)
        args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (args, {})
        if loss_fn is None:
            output = model(*args, **kwargs)
            loss: Tensor = (
                output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
            )
        else:
            loss = entry.strategy.loss(entry.model, args, kwargs, targets, loss_fn)
            self._last_run = entry
        self.backward(loss, weight=weight)
        return loss.detach()

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Scale the gradients of a model to a global norm of at most max_norm.

        Args:
            parameters: ``model.parameters()``, or the model's parameters in any order.
            max_norm: the largest norm allowed.
            norm_type: 2.0 for Euclid, ``float("inf")`` for the largest element.

        Returns:
            The true global norm before clipping, 0-d, the same on every rank; None inside an
            unfinished accumulation window, where nothing is clipped.

        Raises:
            UsageError: a parameter belongs to no prepared model.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.sync_gradients:
            return None
        entries = self._owners_of(given)
        for entry in entries:
            self._unscale(entry)
        chosen = [_subset(entry, given) for entry in entries]
        if len(entries) == 1:
            return entries[0].strategy.clip_grad_norm(max_norm, norm_type, only=chosen[0])
        norms = [
            entry.strategy.clip_grad_norm(float("inf"), norm_type, only=only)
            for entry, only in zip(entries, chosen, strict=True)
        ]
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(self.device) for norm in norms]), norm_type
        )
        for entry, only in zip(entries, chosen, strict=True):
            clip_(list(entry.strategy.gradients(only)), total, max_norm)
        return total

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element of a model to [-clip_value, clip_value]."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.sync_gradients:
            return
        for entry in self._owners_of(given):
            self._unscale(entry)
            for piece in entry.strategy.gradients(_subset(entry, given)):
                piece.clamp_(-clip_value, clip_value)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Context that computes in the run's precision, for code outside a model's forward."""
        handler = autocast_handler or self.handlers.autocast
        with self._autocast(handler):
            yield

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Context that profiles with ``torch.profiler`` and writes a Chrome trace per rank."""
        options = profile_handler or self.handlers.profile
        with _profiler(options) as profiler:
            yield profiler
        if options.output_trace_dir is not None:
            folder = Path(options.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
            self.wait_for_everyone()

    def _autocast(self, handler: AutocastKwargs) -> AbstractContextManager[object]:
        return self.precision.autocast(
            self.device, enabled=handler.enabled, cache_enabled=handler.cache_enabled
        )

    def _owner(self) -> Strategy[Any]:
        """Return the strategy that runs backward: that of the model whose forward ran last."""
        if not self._entries:
            raise UsageError(
                "expected a prepared model before backward(), found none; call "
                "model = accelerator.prepare(model)"
            )
        entry = self._last_run or self._entries[-1]
        return entry.strategy

    def _owners_of(self, parameters: list[Tensor]) -> list[ModelEntry]:
        wanted = {id(parameter) for parameter in parameters}
        owners = [entry for entry in self._entries if wanted & entry.names.keys()]
        known: set[int] = set().union(*(entry.names.keys() for entry in owners))
        if not owners or wanted - known:
            raise UsageError(
                f"expected parameters of prepared models, found {len(wanted - known)} of "
                f"{len(wanted)} that belong to none; pass model.parameters() of what prepare() "
                "returned"
            )
        return owners


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


def _subset(entry: ModelEntry, given: list[Tensor]) -> list[nn.Parameter] | None:
    """Return the model's parameters among those given; None when nothing trainable is missing."""
    wanted = {id(parameter) for parameter in given}
    trainable = [p for p in entry.strategy.unwrap(entry.model).parameters() if p.requires_grad]
    chosen = [parameter for parameter in trainable if id(parameter) in wanted]
    return None if len(chosen) == len(trainable) else chosen


def _profiler(options: ProfileKwargs) -> Any:
    schedule = options.schedule_option
    names = options.activities
    kinds = {
        kind.name.lower(): kind for kind in torch.profiler.ProfilerActivity.__members__.values()
    }
    unknown = [name for name in names or [] if name.lower() not in kinds]
    if unknown:
        raise UsageError(f"expected profiler activities of {sorted(kinds)}, found {unknown}")
    return torch.profiler.profile(
        activities=[kinds[name.lower()] for name in names] if names else None,
        schedule=torch.profiler.schedule(**schedule) if schedule else None,
        on_trace_ready=options.on_trace_ready,
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
    )
