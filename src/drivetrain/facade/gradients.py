"""Gradients from the loss to the optimizer: accumulated, averaged, unscaled, clipped.

The gradient of an accumulation window is the mean that one large batch would have given, and of
nothing before the window. Every micro-batch's loss is divided by the configured number of
micro-batches. A window that ends early is put right once, when its last gradients are synchronised.
With weights (tokens, say) the losses are multiplied by them, and the sum over micro-batches *and*
ranks divides at the end. Gradients that earlier windows left, for this window to add to, keep their
values.

Gradients of a piece of a batch count once all of it is computed, since memory may run out before.
They are taken from autograd's graph beside ``grad``, without hooks and without other ranks, so that
a try leaves nothing behind that would have to be undone. One backward sends their sum the usual
way, when the activations are gone.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from drivetrain import communication
from drivetrain.collectives.facts import gather_facts
from drivetrain.errors import UsageError
from drivetrain.facade.checkpoints import RunCheckpoints, WindowStart
from drivetrain.facade.exchange import Exchange, FiniteCheck, Preemption
from drivetrain.facade.prepared import PreparedModel, RunState, parameters_of
from drivetrain.facade.uneven import UnevenInputs
from drivetrain.facade.weights import WholeWeights
from drivetrain.log import get_logger
from drivetrain.memory import is_out_of_memory, tries_again
from drivetrain.model.guard import STANDS_FOR
from drivetrain.parallel.backward import clip_
from drivetrain.runtime import rng
from drivetrain.runtime.gradient_state import BatchPiece

# --- gradients of a piece, beside grad ---


class Before:
    """The generators, the buffers and the gradients of models, as they are before a try.

    Args:
        models: those that may run.
    """

    def __init__(self, models: Sequence[PreparedModel]) -> None:
        self._random = rng.Snapshot()
        modules = [module for entry in models for module in entry.model.modules()]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in modules]
        self._values = {
            buffer: buffer.clone()
            for _, kept in self._buffers
            for buffer in kept.values()
            if buffer is not None and not hasattr(buffer, STANDS_FOR)
        }
        self._parameters = [parameter for entry in models for parameter in entry.parameters]
        self._gradients = self._present()

    def _present(self) -> list[tuple[Tensor | None, int]]:
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter would be gathered
            gradients = [parameter.grad for parameter in self._parameters]
            return [(each, 0 if each is None else each._version) for each in gradients]

    def check_gradients(self) -> None:
        """Refuse what the function did to gradients: it would count, or be lost, with the try.

        Raises:
            UsageError: they are no longer what they were.
        """
        for (now, version), (before, earlier) in zip(self._present(), self._gradients, strict=True):
            if now is not before or version != earlier:
                raise UsageError(
                    "expected a function of each_piece() that leaves .grad to "
                    "accelerator.backward(), found one that changed it: loss.backward(), a "
                    "backward within backward, or gradients cleared or clipped; clear and clip "
                    "after each_piece(), or take micro_batches(), where memory may not run out"
                )

    @torch.no_grad()
    def restore(self) -> None:
        """Put generators and buffers back."""
        rng.restore(self._random.packed())
        for holder, kept in self._buffers:
            holder.clear()
            holder.update(kept)
        for buffer, values in self._values.items():
            buffer.copy_(values)


class PieceGradients:
    """What the backwards of a piece bring: the weighted sum over its losses."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._weight = 0.0
        self._gradients: dict[Tensor, Tensor] = {}  # in the order in which they come

    def add(self, loss: Tensor, scaled: Tensor, weight: float, options: Mapping[str, Any]) -> None:
        """Compute the gradients of one more backward.

        Args:
            loss: its value counts, times the weight.
            scaled: the loss as it enters backward.
            weight: how much it counts; 0: nothing, whatever its value.
            options: those of ``Tensor.backward``.

        Raises:
            UsageError: options that ask for more than gradients, or a reentrant checkpoint.
        """
        if options.keys() - {"retain_graph"}:
            raise UsageError(
                "expected backward() with retain_graph alone in each_piece(), found "
                f"{', '.join(options)}; take micro_batches(), where memory may not run out"
            )
        leaves = _leaves(scaled)
        found: Sequence[Tensor | None] = ()
        if leaves:
            try:
                with _without_hooks(leaves):
                    found = torch.autograd.grad(scaled, leaves, allow_unused=True, **options)
            except RuntimeError as error:
                if "use_reentrant=True" not in str(error):
                    raise
                raise UsageError(
                    "expected checkpoints with use_reentrant=False in each_piece(), found "
                    "use_reentrant=True, whose backward writes .grad itself; change it, or take "
                    "micro_batches(), where memory may not run out"
                ) from error
        value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        counted = value * weight if weight else torch.zeros_like(value)
        came = {leaf: each for leaf, each in zip(leaves, found, strict=False) if each is not None}
        if not weight:
            came = {leaf: torch.zeros_like(each) for leaf, each in came.items()}
        self._join(counted, weight, came)

    @property
    def is_empty(self) -> bool:
        """Whether no backward came yet."""
        return self._loss is None

    def join(self, other: "PieceGradients") -> None:
        """Add what another part of the piece brings."""
        if other._loss is not None:
            self._join(other._loss, other._weight, other._gradients)

    def _join(self, loss: Tensor, weight: float, gradients: Mapping[Tensor, Tensor]) -> None:
        self._loss = loss if self._loss is None else self._loss + loss
        self._weight += weight
        for leaf, gradient in gradients.items():
            earlier = self._gradients.get(leaf)
            # Sums of narrow gradients are rounded once, when the backward takes them.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._gradients[leaf] = gradient if earlier is None else earlier.to(wide) + gradient

    def send(self, backward: Callable[[Tensor, float], None]) -> None:
        """Run the backward of the whole piece, with the mean loss and its weight."""
        if self._loss is None:
            return
        loss = (self._loss / (self._weight or 1.0)).requires_grad_()
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter would be gathered
            while self._gradients:
                loss = _Given.apply(loss, *self._gradients.popitem())  # type: ignore[no-untyped-call]
        backward(loss, self._weight)


class _Given(torch.autograd.Function):
    """A loss whose backward gives a parameter a gradient that was computed before."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None  # autograd may take its memory
        return above, gradient, None


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors that a backward would give gradients, in the order in which they come."""
    last: dict[Any, float] = {}
    found, seen = [loss.grad_fn], {loss.grad_fn}
    with torch._C.DisableTorchFunctionSubclass():
        while found:
            node: Any = found.pop()
            for following, _ in node.next_functions if node is not None else ():
                if hasattr(following, "variable"):
                    number = node._sequence_nr()
                    last[following] = min(last.get(following, inf), number)
                elif following not in seen:
                    seen.add(following)
                    found.append(following)
        return [each.variable for each in sorted(last, key=lambda each: -last[each])]


@contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Take hooks off, which are for what the backward of the whole piece brings."""
    # The very dicts, which the handles of the hooks know.
    taken = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    for hooks, _ in taken:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in taken:
            hooks.update(kept)


# --- gradients of a window ---

logger = get_logger(__name__)


def _one_weighted() -> UsageError:
    return UsageError(
        "expected one weighted backward() per micro-batch inside accumulate(), found one after the "
        "window's gradients were already divided by the sum of weights; add the losses before "
        "backward(), and use 'with accelerator.accumulate(model):'"
    )


@dataclass(eq=False)
class WindowMean:
    """The normalisation of one accumulation window.

    Gradients that were there before the window stay as they were: it keeps copies of them where its
    own may be multiplied. A loop that clears gradients has none.

    Attributes:
        state: of the run, with the window it belongs to.
        counted: whether the micro-batches are counted by ``accumulate()``; a loop that counts them
            itself always has full windows.
        counts_nothing: whether the last loss has the weight 0: it may be no number.
    """

    state: RunState
    counted: bool = False
    counts_nothing: bool = False
    _earlier: "list[KeptGradient] | None" = None
    _weights: list[float] = field(default_factory=list)
    _unweighted: bool = False
    _finished: bool = False

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
            self.counts_nothing = not self._weights[-1]
        if self._weights and self._unweighted:
            raise UsageError(
                "expected a weight for every loss of an accumulation window or for none, found "
                "both; pass weight= to each backward() of the window"
            )
        if weight is None:
            length = (
                self.state.window.micro_batch if self._finished else self.state.window.num_steps
            )
            return loss / length if length > 1 else loss
        if self._finished or (self.state.window.num_steps > 1 and not self.counted):
            raise _one_weighted()
        return loss * weight

    def keep_earlier(self) -> None:
        """Copy the gradients before the window's first backward; before others, drop cleared ones.

        Only where ``finish`` may return a factor. A script may clear gradients between the
        micro-batches of a window.
        """
        window = self.state.window
        may_end_early = self.counted and window.num_steps > 1 and window.sync_with_dataloader
        if not (self._weights or (may_end_early and window.divides_by_length)):
            return
        if self._earlier is None:
            self._earlier = [
                KeptGradient(entry, parameter)
                for entry in self.state.models
                if _is_any(entry.strategy.gradients())
                for _, parameter in entry.model.named_parameters()
            ]
        self._earlier = [kept for kept in self._earlier if _is_any(kept.pieces())]

    def scale_fresh(self, factor: float) -> None:
        """Multiply the window's gradients; gradients from before the window stay as they were."""
        for entry in self.state.models:
            entry.strategy.gradients.scale(factor)
        for kept in self._earlier or ():
            kept.restore(factor)

    def finish(self) -> float | None:
        """Return the factor that makes the synchronised gradients right, None when they are.

        Collective over the run's axis ``dp`` when the losses are weighted.
        """
        if self._finished:
            return None
        if self._weights:
            self._finished = True
            axis, device = self.state.run.mesh["dp"], self.state.world.device
            # In fp64: sums of token counts stay exact.
            total = torch.tensor(sum(self._weights), dtype=torch.float64, device=device)
            whole = float(communication.reduce(total, "sum", group=axis))
            # The strategy has averaged over the axis: its size turns the mean into a sum again.
            return axis.size / whole if whole else 0.0
        length = self.state.window.micro_batch
        is_full = length >= self.state.window.num_steps
        if is_full or not (self.counted and self.state.window.divides_by_length):
            return None
        self._finished = True
        return self.state.window.num_steps / length


class KeptGradient:
    """A copy of one parameter's gradient, as far as this rank's optimizers read it.

    Args:
        entry: the model.
        parameter: one of its parameters.
    """

    def __init__(self, entry: PreparedModel, parameter: nn.Parameter) -> None:
        self._entry, self._parameter, self._scale = entry, parameter, entry.scale
        self._copies = [piece.clone() for piece in self.pieces()]

    def pieces(self) -> list[Tensor]:
        """Return the gradient as it is now; empty where there is none."""
        return list(self._entry.strategy.gradients([self._parameter]))

    def restore(self, factor: float) -> None:
        """Undo a factor for the part of the gradient that the copy is of, if it is there."""
        if self._parameter in self._entry.hooks.earlier:
            return
        # The copy carries the loss scale of its time.
        scale = self._entry.scale / self._scale if self._entry.scale and self._scale else 1.0
        for piece, copy in zip(self.pieces(), self._copies, strict=True):
            piece.add_(copy, alpha=(1.0 - factor) * scale)


def _is_any(pieces: Iterable[Tensor]) -> bool:
    """Whether a gradient is there, and is not zero."""
    return any(bool(piece.any()) for piece in pieces)


# --- the gradients ---


@dataclass(eq=False)
class WindowGradients:
    """The gradients of all prepared models in one accumulation window.

    Attributes:
        state: of the run; gradients are averaged over the axis ``dp`` of its mesh.
        weights: compares those of the ranks.
        finite: looks at losses and gradients.
        checkpoints: are told where a window begins, and let the run go back.
        preemption: is told of each step.
        garbage: Python's collections, after the same steps on all ranks.
        uneven: is told of each backward.
        held_back: of a piece that may be computed again; None: gradients count at once.
    """

    state: RunState
    weights: WholeWeights
    finite: FiniteCheck
    checkpoints: RunCheckpoints
    preemption: Preemption
    garbage: "SharedCollections"
    uneven: UnevenInputs
    held_back: PieceGradients | None = None
    _exchanges: dict[tuple[int, ...], Exchange] = field(default_factory=dict)
    """By the ranks; of all under ()."""
    _stepped_at: int = 0
    """Backwards when an optimizer stepped last."""
    _mean: WindowMean = field(init=False)

    def __post_init__(self) -> None:
        """Begin with a window that no ``accumulate()`` counts."""
        self._mean = WindowMean(self.state)

    @contextmanager
    def micro_batch(
        self,
        models: Sequence[nn.Module],
        *,
        first: bool = True,
        last: bool = True,
        piece: BatchPiece | None = None,
    ) -> Iterator[None]:
        """Context of one micro-batch of these models; of all models when there are none.

        It may be a piece of a batch: the first, the last, with some of its rows. Inside of another
        micro-batch it is a piece of that one, or the same one with further models.
        """
        window = self.state.window
        inside = window.is_inside
        first = first and not inside
        if not inside and window.sync_gradients:
            self._start_window(counted=True)
        with ExitStack() as stack:
            stack.enter_context(self.explained())
            if piece is not None or not inside:
                stack.enter_context(window.next_micro_batch(first=first, last=last, piece=piece))
            if (window.num_steps > 1 or not last) and first and window.micro_batch == 1:
                self.checkpoints.saved.begun = WindowStart(self.state, window.windows)
            self.state.step = window.micro_batch
            if not (window.sync_gradients or window.sync_each_batch):
                for entry in self.state.chosen(models):
                    entry.accumulated = True
                    stack.enter_context(entry.strategy.accumulating())
            yield
        if window.sync_gradients:
            self.state.scaler.update()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context in which an allocator's error says who holds memory, and what would fit.

        Raises:
            UsageError: torch's error follows from parameters that were converted since ``prepare``.
        """
        try:
            yield
        except Exception as error:
            self.explain(error)
            if type(error) is RuntimeError:
                for entry in self.state.models:
                    entry.check_converted(error)
            raise

    def explain(self, error: Exception) -> None:
        """Tell the observer of an error, if it is one of an allocator that the script will see."""
        if is_out_of_memory(error) and not tries_again.get():
            self.state.observer.out_of_memory(error)

    def loss_of(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor] | None,
    ) -> Tensor:
        """Return the loss of a batch, which ``backward`` is given next; see ``pipeline_step``."""
        entry = self.state.model(model)
        args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (args, {})
        if loss_fn is None:
            output = model(*args, **kwargs)
            loss: Tensor = (
                output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
            )
            return loss
        self.state.observer.handed_over(args, kwargs, targets)
        with self.explained():
            pipeline = entry.strategy.pipeline
            if pipeline is None:
                loss = loss_fn(entry.model(*args, **kwargs), targets)
            else:
                loss = pipeline.loss(args, kwargs, targets, loss_fn)
        # A strategy may run parts of the model only: then the model's own hook has noted nothing.
        self.state.last_run = entry
        return loss

    def backward(
        self, loss: Tensor, weight: float | Tensor | None, options: Mapping[str, Any]
    ) -> None:
        """Run backward; at the end of a window the gradients are synchronised and exact means."""
        state, window = self.state, self.state.window
        _check_loss(loss)
        rows = None if window.piece is None else window.piece.rows
        weight = rows if weight is None else weight  # pieces of a batch need not be equally large
        if self.held_back is not None:
            self._hold_back(self.held_back, loss, float(weight or 0.0), options)
            return
        window.use(trains=True)
        if window.micro_batch == 0:
            self._start_window(counted=False)
        scaled = self._scaled(self._mean.divide(loss, weight))
        self._mean.keep_earlier()
        if self._is_plain(weight):
            scaled.backward(**options)  # type: ignore[no-untyped-call]
            return
        if window.uneven:  # ranks have different numbers of backwards and steps
            self.uneven.announce(state.running(), loss, weighted=weight is not None)
        else:
            state.run.traffic.begin_backward()
        synced = window.sync_gradients
        factor = self._mean.finish() if synced else None
        for entry in state.models:
            entry.check_converted()
            entry.check_parameters(due=synced)  # whoever steps with the gradients to come
            entry.strategy.gradients.will_scale(1.0 if factor is None else factor)
            if synced and not (entry.compared or window.uneven):
                self.weights.compare_first(entry)
        state.observer.before_backward()  # times the backward, not the wait for weights above
        strategy = state.running().strategy
        counts = not self._mean.counts_nothing
        with self.explained(), state.in_backward(scaled, counts=counts, averages=synced):
            strategy.backward(scaled, **options)
            if factor is not None:
                self._mean.scale_fresh(factor)  # before hooks of the script see them
        # The shapes of arguments alone are kept: the step may need their memory.
        state.last_call = tree_map_only(Tensor, _without_values, state.last_call)
        if strategy.pipeline is not None:
            strategy.pipeline.publish(loss)
        window.backwards += 1
        if counts:
            # A pipeline publishes its value later.
            which = id(state.running()) if strategy.pipeline is not None else None
            self.finite.losses.append((which, loss.detach()))
        state.observer.after_backward(loss, weight)

    def _hold_back(
        self, piece: PieceGradients, loss: Tensor, weight: float, options: Mapping[str, Any]
    ) -> None:
        if self.state.window.sync_gradients and not piece.is_empty:
            raise _one_weighted()
        piece.add(loss, self.state.scaler.scale(loss * weight), weight, options)

    def clip_norm(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float
    ) -> Tensor | None:
        """Scale gradients to a global norm of at most ``max_norm``, and return the norm before."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.state.window.sync_gradients:
            return None
        if self._is_plain():
            return nn.utils.clip_grad_norm_(given, max_norm, norm_type)
        self.state.observer.before_update()
        entries = self.state.owners_of(given)
        norm = self._clip_norm(entries, given, max_norm, norm_type)
        self.state.observer.clipped(norm)
        dtypes = {spec.dtype for entry in entries for spec in entry.given.parameters}
        wide = dtypes & {torch.float64, torch.complex128}  # as torch has it, whatever was summed in
        return norm.to(torch.float64 if wide else torch.float32)

    def _clip_norm(
        self, entries: list[PreparedModel], given: list[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """Clip the gradients of models to one norm."""
        for entry in entries:
            self._see_gradients(entry)
        chosen = [(entry, entry.subset(given)) for entry in entries]
        norm = _clip_together(chosen, max_norm, norm_type, self.state.world.device)
        # It speaks for all gradients of all ranks, unless ranks step by themselves.
        whole = [entry for entry, only in chosen if only is None]
        if not any(entry.strategy.pace.apart for entry in whole):
            self.finite.norms.update((id(entry), norm.detach()) for entry in whole)
        return norm

    def clip_value(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp gradient elements to [-clip_value, clip_value]."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.state.window.sync_gradients:
            return
        entries = self.state.owners_of(given)
        _check_unbegun(entries)
        for entry in entries:
            self._see_gradients(entry)
            for piece in entry.strategy.gradients(entry.subset(given)):
                piece.clamp_(-clip_value, clip_value)

    def unscale(self, optimizer: Optimizer | Iterable[Optimizer] | None) -> None:
        """Divide by the loss scale the gradients of these optimizers' models; None means all."""
        if optimizer is None:
            chosen: list[Optimizer] = list(self.state.optimizers)
        else:
            chosen = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for each in chosen:
            for entry in self.state.trained_by(getattr(each, "optimizer", each)):
                self._unscale(entry)

    def before_step(self, optimizer: Optimizer) -> bool:
        """Unscale gradients that still carry a scale; return whether the step may be taken.

        Raises:
            UsageError: the model has parameters that came after ``prepare``.
        """
        scaler = self.state.scaler
        self._check_counted()
        self.state.observer.before_update()
        if not self.state.window.uneven:
            self.state.run.traffic.begin_step(optimizer.param_groups)
        entries = self.state.trained_by(optimizer)
        for entry in entries:
            entry.check_parameters(due=not entry.checked)
            entry.used, entry.checked = True, False
            self._see_gradients(entry)
        taken = self._agree_to_step(optimizer, entries)
        for entry in entries:
            entry.strategy.gradients.step_decided(taken=taken)
        if not taken:
            return False
        if not scaler.enabled:
            return True
        bad = [entry.made_with for entry in entries if optimizer in entry.overflow]
        optimizers = enumerate(self.state.optimizers)
        number = next(i for i, each in optimizers if each.optimizer is optimizer)
        scaler.record(number, overflow=bool(bad), made_with=min(bad, default=1.0))
        if not self.state.window.is_inside:  # else accumulate() around the step updates it
            scaler.update()
        return not bad

    def _check_counted(self) -> None:
        """Warn of a loop without ``accumulate()`` that steps before a window is full."""
        window = self.state.window
        since, self._stepped_at = window.backwards - self._stepped_at, window.backwards
        if window.num_steps > 1 and not self._mean.counted and since % window.num_steps:
            logger.warning_once(
                f"an optimizer steps after {since} of the {window.num_steps} backwards that "
                f"accumulation: {window.num_steps} divides losses by; use 'with "
                "accelerator.accumulate(model):' around each micro-batch, or accumulation: 1"
            )

    def _agree_to_step(self, optimizer: Optimizer, entries: Sequence[PreparedModel]) -> bool:
        """Exchange facts with the other ranks; return whether all numbers are finite."""
        if not entries or self.state.window.uneven:
            return True
        self.finite.look(optimizer)
        bad = self.finite.is_norm_bad(optimizer)
        ranks = next((e.strategy.pace.ranks for e in entries if e.strategy.pace.ranks), None)
        key = () if ranks is None else ranks.ranks
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(self.state.world, ranks)
        due = (exchange := self._exchanges[key]).is_due()
        if not bad and (due or self.finite.must_tell(optimizer)):
            told = self.preemption.heard and ranks is None
            apart = ranks is None and any(entry.strategy.pace.apart for entry in entries)
            told, bad = exchange.tell(told=told, bad=self.finite.found(optimizer), apart=apart)
            self.preemption.told = self.preemption.told or told
        if bad:
            self.finite.act(optimizer, ranks, self.checkpoints.go_back)
        else:
            self.finite.step_is_good()
        return not bad

    def after_step(self) -> None:
        """Tell the observer that an optimizer has stepped, or left out a step."""
        if not self.state.window.uneven:
            self.state.run.traffic.end_step()
        self.state.last_call = None
        self.state.observer.after_step()
        self.preemption.after_step()
        if not self.state.window.uneven:
            self.weights.compare_when_due()
        self.garbage.after_step(self.state.steps)

    def _is_plain(self, weight: float | Tensor | None = None) -> bool:
        """Whether no model is prepared, and none needs to be: autograd's gradients are right."""
        state = self.state
        alone = state.world.size == 1 and not state.scaler.enabled
        return not state.models and alone and weight is None and state.window.num_steps == 1

    def _synchronize(self, entry: PreparedModel) -> None:
        """Average what a window has kept local, where no backward of its last micro-batch did.

        Collective then. So a model that had no part in that micro-batch is stepped as in one
        process, and its gradients may be told from those of the next window.

        Raises:
            UsageError: a pipeline, which has no backward without a forward.
        """
        if not entry.accumulated or not self.state.window.sync_gradients:
            return
        entry.accumulated = False
        waits, pipeline = entry.strategy.pace.waits, entry.strategy.pipeline
        if waits and pipeline is not None:
            raise UsageError(
                "expected a backward of each model in the last micro-batch of an accumulation "
                f"window, found none of {type(entry.model).__name__}, a pipeline: put one 'with "
                "accelerator.accumulate(one, other):' around the backwards of a batch"
            )
        if waits and self._is_any_at_hand(entry):
            self._average(entry)
        entry.hooks.run()

    def _average(self, entry: PreparedModel) -> None:
        """Average gradients by a backward that brings none. Collective."""
        nothing = torch.zeros((), device=self.state.world.device, requires_grad=True)
        entry.strategy.gradients.will_scale(1.0)  # they have the window's factor
        with entry.strategy.accumulating(False):
            if self.state.window.uneven:
                self.uneven.announce(entry, nothing, weighted=False)
            entry.strategy.backward(nothing)

    def _is_any_at_hand(self, entry: PreparedModel) -> bool:
        """Whether the script has left gradients of a model on some rank. Collective."""
        if self.state.window.uneven:
            return True
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter answers slowly
            here = any(parameter.grad is not None for parameter in entry.parameters)
        return any(gather_facts(here, bool, doing="the end of an accumulation window"))

    def _start_window(self, *, counted: bool) -> None:
        for entry in self.state.models:
            if entry.strategy.pipeline is None:  # one refuses at a step; a window may be given up
                self._synchronize(entry)
            # Of a window that was given up; where gradients wait, the script has its own windows.
            if entry.hooks.earlier and (counted or not entry.strategy.pace.waits):
                entry.hooks.earlier.clear()
        self._mean = WindowMean(self.state, counted)
        self.finite.losses, self.finite.norms = [], {}

    def _see_gradients(self, entry: PreparedModel) -> None:
        """Show a model's gradients, averaged and unscaled, before they are clipped or used."""
        if self.held_back is not None:
            raise UsageError(
                "expected gradients to be clipped and optimizers to step after each_piece(), found "
                "it in the function, before gradients are sent; move it behind"
            )
        self._unscale(entry)
        self.state.observer.gradients(entry)

    def _scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, to which the gradients at hand are brought.

        They carry another scale when they were unscaled already, or when the scale has changed
        since with the step of another model.
        """
        if not self.state.scaler.enabled:
            return loss
        scale = self.state.scaler.get_scale()
        for entry in self.state.models:
            if entry.scale not in (None, scale):
                entry.strategy.gradients.scale(scale / entry.scale)
            entry.scale, entry.unscaled = scale, False
        return self.state.scaler.scale(loss)

    def _unscale(self, entry: PreparedModel) -> None:
        self._synchronize(entry)
        if entry.scale is None or entry.unscaled or not self.state.scaler.enabled:
            return
        world = self.state.world
        overflow = self.state.scaler.unscale(
            list(entry.strategy.gradients()), entry.scale, ranks=world.size, device=world.device
        )
        entry.overflow = self._overflowed(entry) if overflow and entry.optimizers else set()
        entry.made_with, entry.scale, entry.unscaled = entry.scale, 1.0, True

    def _overflowed(self, entry: PreparedModel) -> set[Optimizer]:
        """Return the optimizers of which a rank has gradients that are not finite. Collective."""
        finite = [
            all(
                bool(piece.isfinite().all())
                for piece in entry.strategy.gradients(entry.subset(parameters_of(optimizer)))
            )
            for optimizer in entry.optimizers
        ]
        found = torch.tensor(finite, device=self.state.world.device)
        told = communication.gather(~found).view(-1, len(finite)).any(0).tolist()
        return {each for each, bad in zip(entry.optimizers, told, strict=True) if bad}


def _clip_together(
    chosen: Sequence[tuple[PreparedModel, list[nn.Parameter] | None]],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """Clip parameters of models, or all of them, to one norm; return the norm before."""
    if len(chosen) == 1:
        ((entry, only),) = chosen
        return entry.strategy.gradients.clip(max_norm, norm_type, only=only)
    # Several models have one norm: it is measured for each, and clips all of them.
    norms = [
        entry.strategy.gradients.clip(float("inf"), norm_type, only=only).to(device)
        for entry, only in chosen
    ]
    if not norms:
        return torch.zeros((), device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if max_norm == math.inf and bool(total.isfinite()):
        return total
    _check_unbegun([entry for entry, _ in chosen])
    for entry, only in chosen:
        clip_(list(entry.strategy.gradients(only)), total, max_norm)
    return total


def _check_unbegun(entries: Iterable[PreparedModel]) -> None:
    """Refuse to clip gradients with which a step may have begun, on every rank."""
    if any(entry.strategy.pace.begun for entry in entries):
        raise UsageError(
            "expected no clipping with offload.in_backward: true, found a call that clips: updates "
            "have begun by then; leave it out, or take offload.in_backward: false"
        )


def _without_values(tensor: Tensor) -> Tensor | None:
    plain = type(tensor) is Tensor and not tensor.is_nested and tensor.layout is torch.strided
    return tensor.new_empty(tensor.shape, device="meta") if plain else None


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


# --- python's garbage collections, after the same steps on all ranks ---


@dataclass(slots=True)
class SharedCollections:
    """Collects garbage after the same steps on all ranks, and keeps Python from it in between.

    Attributes:
        every: steps from one collection to the next; 0 leaves Python alone.
    """

    every: int
    _began: bool = False
    _was_enabled: bool = False
    _last: int = 0

    def after_step(self, step: int) -> None:
        """Collect after the first step, and after each so many steps.

        Args:
            step: number of the optimizer step, from 1.
        """
        if not self.every:
            return
        if not self._began:
            self._began, self._was_enabled = True, gc.isenabled()
            gc.disable()
            gc.collect()
        elif step // self.every != self._last // self.every:
            gc.collect()
        self._last = step

    def release(self) -> None:
        """Let Python collect by itself again, if it did before."""
        if self._began and self._was_enabled:
            gc.enable()
        self._began = False
