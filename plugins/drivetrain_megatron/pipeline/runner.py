"""The stages of one rank at work, as a schedule says: receive, compute, send the result on."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.collectives import Communicator
from drivetrain.collectives.facts import gather_facts
from drivetrain.errors import ConfigError, UsageError
from drivetrain.model.untouched import LeftBehind
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.ranges import STAGE, named_range
from drivetrain.strategy import Strategy
from drivetrain_megatron.dropout import Dropout
from drivetrain_megatron.pipeline.schedules import Action, ActionKind, Span, Timeline, save_trace
from drivetrain_megatron.pipeline.stage import SharedParameters, Split, Stage
from drivetrain_megatron.pipeline.transfer import (
    Arrival,
    Direction,
    Link,
    Message,
    MicroBatch,
    absent_like,
    is_absent,
)
from drivetrain_megatron.recording.phases import TensorMeta
from drivetrain_megatron.recording.proxy import with_values
from drivetrain_megatron.tensor.linear import WeightGradients

# --- one stage at work: forward and backward of micro-batches, and the tensors kept between ---


LossOf = Callable[[Any, Any], Tensor]
"""Makes the loss of what the model returned and of the micro-batch's targets."""


Send = Callable[[Sequence[Tensor]], None]
"""Sends the gradients of a stage's inputs to the stage before."""


@dataclass(frozen=True, slots=True)
class StageParts:
    """The data-parallel strategy inside, the connections between stages, and what stages share.

    The cell's axes are those whose ranks hold one replica together, the pipeline's among them. The
    replicas are on the axis of data parallelism.
    """

    inner: Strategy[Any]
    device: torch.device
    link: Link
    axis: Communicator
    cell: Sequence[Communicator]
    replicas: Communicator
    shared: SharedParameters
    weights: WeightGradients
    dropout: Dropout


@dataclass(slots=True)
class _InFlight:
    """What is kept of a micro-batch until its backward, which begins at the roots.

    Attributes:
        received: the inputs of the stage.
        roots: where backward begins.
        returned: the facts of the gradients that come back.
        gradients: those of the roots, where the script's loss gave them.
    """

    received: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]
    returned: Sequence[TensorMeta]
    gradients: list[Tensor] | None = None


class StageWorker:
    """A stage during one step.

    Each forward runs in a context ``besides``, where an earlier stage of the rank has run the code
    around blocks, too.

    Attributes:
        outputs: of the model, by micro-batch: real on the last stage only.
        kept: indices of blocks whose tensors are kept in ``made``, by micro-batch and block: the
            rest of the model then runs on those of the whole batch. None on ordinary passes.
        final: the micro-batch whose backward is the rank's last and synchronises gradients; None
            while gradients stay local.
        final_weight: the same, where the half for the weights is the last.
        uncounted: micro-batches whose losses do not count, and may be no numbers.
    """

    def __init__(
        self, stage: Stage, parts: StageParts, besides: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.stage, self._parts = stage, parts
        self._besides = besides
        self._kept: dict[int, _InFlight] = {}
        self.batches: dict[int, MicroBatch] = {}
        self.outputs: dict[int, Any] = {}
        self.kept: Collection[int] | None = None
        self.made: dict[int, dict[int, tuple[Tensor, ...]]] = {}
        self.losses: dict[int, Tensor] = {}
        self.final: int | None = None
        self.final_weight: int | None = None
        self.uncounted: set[int] = set()
        self.loss_of: LossOf | None = None
        self.seeds: dict[int, Tensor] = {}
        self.losses_to_run: dict[int, Tensor] = {}

    # --- what the interpreter asks ---

    def output_metas(self, micro_batch: int) -> Sequence[TensorMeta]:
        """Return the facts of the gradients that come back."""
        if micro_batch in self._kept:
            return self._kept[micro_batch].returned
        sent = self.stage.sends(self.batches[micro_batch])
        return [meta for meta in sent if meta.requires_grad]

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the stage; keep its graph for backward."""
        batch = self.batches[micro_batch]
        metas = self.stage.receives(batch)
        grad = torch.is_grad_enabled()
        received = tuple(
            tensor.requires_grad_(grad and meta.requires_grad)
            for tensor, meta in zip(inputs, metas, strict=True)
        )
        # A view, so that what the block changes in place is not the leaf itself.
        views = tuple(t.view_as(t) if t.requires_grad else t for t in received)
        with (
            self._besides(),
            self._parts.dropout.forward(batch.number),
            self._parts.inner.running(),
        ):
            found = self.stage.run(batch, views, self.kept)
        self.outputs[micro_batch], roots = found.output, found.sent
        if self.kept is not None:
            made = {self.stage.blocks.start - 1: received, **found.made}
            self.made[micro_batch] = {i: made[i] for i in self.kept if i in made}
        if self.stage.is_last and self.loss_of is not None:
            with self._parts.dropout.forward(batch.number):
                loss = self.loss_of(found.output, batch.targets)
            self.losses[micro_batch] = loss.detach()
            self.outputs[micro_batch] = None
            roots = (loss,)
        if grad:
            # Dtypes depend on autocast, and backward runs outside of it.
            returned = self.output_metas(micro_batch)
            self._kept[micro_batch] = _InFlight(received, roots, returned)
        return found.sent

    def backward(self, micro_batch: int, gradients: Sequence[Tensor], send: Send) -> None:
        """Run backward of a micro-batch; gradients of inputs are sent as soon as they are there."""
        if micro_batch in self.losses_to_run:
            self._backward_from(self.losses_to_run.pop(micro_batch), micro_batch, send)
            return
        kept = self._kept.pop(micro_batch)
        roots = [root for root in kept.roots if root.requires_grad]
        given = list(gradients)
        if kept.gradients is not None:
            given = kept.gradients
        elif self.stage.is_last and micro_batch not in self.seeds:
            roots, given = [], []  # its loss does not count, and may be no number
        elif self.stage.is_last:
            given = [self.seeds[micro_batch].to(root.dtype) for root in roots]
        else:
            reached = [not is_absent(gradient) for gradient in given]
            roots, given = list(compress(roots, reached)), list(compress(given, reached))
        with _sending(kept.received, send):
            self._run_backward(micro_batch, roots, given, synchronize=self.final == micro_batch)

    def begin_at(
        self, micro_batch: int, roots: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Say where the backward of a micro-batch of the last stage begins."""
        kept = self._kept[micro_batch]
        kept.roots, kept.gradients = tuple(roots), list(gradients)

    def _backward_from(self, loss: Tensor, micro_batch: int, send: Send) -> None:
        """Run backward of the last stage from a loss that the script made of its output."""
        kept = self._kept.pop(micro_batch)
        final = self.final == micro_batch
        with _sending(kept.received, send):
            with (
                nullcontext() if final else self._parts.inner.accumulating(),
                self.counting(micro_batch),
            ):
                self._parts.inner.backward(with_values(loss))
            if final:
                self._parts.shared.send_gradients()

    def backward_weight(self, micro_batch: int) -> None:
        """Run the half of backward that makes the gradients of weights."""
        final = self.final_weight == micro_batch
        roots = self._parts.weights.roots(micro_batch)
        ones = [torch.ones_like(root) for root in roots]
        self._run_backward(micro_batch, roots, ones, synchronize=final)

    @contextmanager
    def counting(
        self, micro_batch: int, sums: Mapping[nn.Parameter, Tensor] | None = None
    ) -> Iterator[None]:
        """Context of a backward, which adds zeros for a loss that does not count.

        Parameters that are lent get the sum of their copies' gradients, if there is one.
        """
        with ExitStack() as stack:
            for leaf in self._parts.shared.leaves() if micro_batch in self.uncounted else ():
                hook = partial(_instead, (sums or {}).get(leaf))
                stack.callback(leaf.register_hook(hook).remove)  # type: ignore[no-untyped-call]
            yield

    # --- inside ---

    def clear(self, but: Collection[int] = ()) -> bool:
        """Forget micro-batches whose backward nobody asked for, but for some.

        Returns:
            Whether there were any.
        """
        abandoned = bool(self._kept.keys() - but)
        kept = (self._kept, self.batches, self.outputs, self.made, self.losses, self.seeds)
        for each in kept:
            for number in each.keys() - but:
                del each[number]
        self.uncounted.intersection_update(but)
        self.final = self.final_weight = None
        self._parts.weights.clear()
        return abandoned

    def _run_backward(
        self,
        micro_batch: int,
        roots: Sequence[Tensor],
        gradients: list[Tensor],
        *,
        synchronize: bool,
    ) -> None:
        """Run backward from tensors with given gradients; the list of these is emptied.

        One that begins nowhere, where no target counts, runs too: other replicas may send the
        gradients of this micro-batch.
        """
        tensors, sums = list(roots), {}
        if synchronize:
            # Copies' gradients enter this very backward: the data-parallel strategy then meets each
            # gradient once, and whole.
            parameters, summed = self._parts.shared.receive_gradients()
            tensors += parameters
            gradients += summed
            if micro_batch in self.uncounted:
                sums = dict(zip(parameters, summed, strict=True))
        with (
            nullcontext() if synchronize else self._parts.inner.accumulating(),
            self.counting(micro_batch, sums),
        ):
            self._parts.inner.backward(seeded(tensors, gradients, self._parts.device))
        if synchronize:
            self._parts.shared.send_gradients()


def _instead(other: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:  # another half of backward makes it
        return None
    return torch.zeros_like(gradient) if other is None else other


@contextmanager
def _sending(leaves: Sequence[Tensor], send: Send) -> Iterator[None]:
    """Context of a backward: sends the gradients of received leaves when the last has come.

    That is inside of backward: the stage before begins while weights' gradients are computed here.
    Where some never come, as of inputs without use, it is at the end.
    """
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    missing = len(asked)

    def arrived(_: Tensor) -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            send_all()

    def send_all() -> None:
        gradients = [absent_like(leaf) if leaf.grad is None else leaf.grad for leaf in asked]
        for leaf in asked:
            leaf.grad = None
        send(gradients)

    hooks = [leaf.register_post_accumulate_grad_hook(arrived) for leaf in asked]  # type: ignore[no-untyped-call]
    try:
        yield
        if missing:
            missing = 0
            send_all()
    finally:
        # A leaf keeps its hook, and this hook the leaves: Python sees no such circle of tensors.
        for hook in hooks:
            hook.remove()


def find_loss(output: Any) -> Tensor | None:
    """Return the loss in a model's output, ``output.loss`` or a 0-d output; else None."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        loss = leaves[0] if len(leaves) == 1 else None
    is_loss = isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point()
    return loss if is_loss else None


def seeded(tensors: Sequence[Tensor], gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return a 0-d loss whose backward gives these tensors these gradients.

    A data-parallel strategy runs backward from a loss; a stage has the gradients of its outputs.
    Without any tensors the loss reaches nothing. The list of gradients is emptied in backward,
    since a gradient that nobody else holds becomes a parameter's own instead of being copied.
    """
    if not tensors:
        return torch.zeros((), device=device, requires_grad=True)
    loss: Tensor = _Seeded.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return loss


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *given


# --- all stages of this rank, as a schedule says ---


Workers: TypeAlias = Mapping[int, StageWorker]
"""By index of the stage."""


class LocalStages:
    """The stages of this rank at work.

    Attributes:
        workers: by index of the stage.
        link: this rank's end of the pipeline.
        count: how many stages there are on all ranks.
        left: what a forward changes outside of blocks, so that it does so once in each call.
        shared: the parameters that stages share.
        replicas_decide: whether the ranks of other replicas take part in decisions.
        spans: when the actions of this step ran.
    """

    def __init__(self, split: Split, parts: StageParts) -> None:
        self._parts = parts
        self.inner, self.device, self.dropout = parts.inner, parts.device, parts.dropout
        self._axis, self.link = parts.axis, parts.link
        # Replicas that need each other in forwards, or in the backward of each micro-batch, must
        # run as many: they decide together.
        pace = self.inner.pace
        self.replicas_decide = (pace.forwards or pace.backwards) and parts.replicas.size > 1
        together = (*parts.cell, parts.replicas) if self.replicas_decide else parts.cell
        self._together = [axis for axis in together if axis.size > 1]
        self.shared = parts.shared
        self.ranks, self.rank = parts.axis.size, parts.axis.rank
        self.count = parts.axis.size * len(split.stages)
        self.left = LeftBehind(split.parts.model, split.parts.inside)
        self._stage = split.stages[0]
        self.workers = {stage.index: self._worker(stage) for stage in split.stages}
        self._arrivals: dict[Message, Arrival] = {}
        self._stale, self._trained = False, True
        self.spans: list[Span] = []

    @property
    def only(self) -> StageWorker:
        """The worker of this rank's stage.

        Raises:
            UsageError: it has several.
        """
        if len(self.workers) > 1:
            raise UsageError(
                f"expected the loss inside of the model with {len(self.workers)} chunks per rank, "
                "found one that is made outside: an interleaved schedule needs the whole batch at "
                "once; return the loss from the model, use accelerator.pipeline_step(model, "
                "inputs, targets, loss_fn=...), or set chunks: 1"
            )
        return self.workers[self.rank]

    @property
    def last_blocks(self) -> range:
        """The blocks whose tensors the last stage has, where they are proxies here."""
        return range(0) if self.last is not None else self._stage.last_blocks

    @property
    def last(self) -> StageWorker | None:
        """The worker of the last stage; None on other ranks."""
        return self.workers.get(self.count - 1)

    def act(self, actions: Sequence[Action]) -> None:
        """Run some actions of this rank in order.

        Their times are kept, without the time of waiting for messages.

        Raises:
            CollectiveError: a neighbor ended or did not send in time.
        """
        self.spans += self._run(actions, self.workers)

    def _run(self, actions: Sequence[Action], workers: Workers) -> list[Span]:
        spans = []
        with self.telling(), self.dropout.several():
            for index, action in enumerate(actions):
                for following in actions[index : index + 2]:
                    self._expect(following, workers)
                spans.append(self._do(action, workers[action.stage]))
        return spans

    def _expect(self, action: Action, workers: Workers) -> None:
        """Post the receive of an action's inputs from another rank."""
        message = self._needed(action)
        if message is None or message in self._arrivals:
            return
        worker, number = workers[action.stage], action.micro_batch
        if message.direction is Direction.FORWARD:
            metas: Sequence[TensorMeta] = worker.stage.receives(worker.batches[number])
        else:
            metas = worker.output_metas(number)
        self._arrivals[message] = self.link.receive(message, metas)

    def _needed(self, action: Action) -> Message | None:
        if action.kind is ActionKind.FORWARD:
            first = action.stage == 0
            return None if first else Message.input_of(action.stage, action.micro_batch)
        last = action.stage == self.count - 1
        if last or not action.kind.returns:
            return None
        return Message.gradient_of(action.stage, action.micro_batch)

    def _do(self, action: Action, stage: StageWorker) -> Span:
        message = self._needed(action)
        given = self._arrivals.pop(message).wait() if message is not None else ()
        start = time.perf_counter()
        kind = action.kind.name.lower()
        with named_range(STAGE, f"{action.stage}: {kind} {action.micro_batch}"):
            self._compute(action, stage, given)
        return Span(action, start, time.perf_counter())

    def _compute(self, action: Action, stage: StageWorker, given: Sequence[Tensor]) -> None:
        """Run an action whose inputs are there; its results are sent."""
        micro_batch = action.micro_batch
        if action.kind is ActionKind.FORWARD:
            outputs = stage.forward(micro_batch, given)
            if action.stage + 1 < self.count:
                self.link.send(Message.input_of(action.stage + 1, micro_batch), outputs)
        elif action.kind is ActionKind.WEIGHT:
            stage.backward_weight(micro_batch)
        else:

            def send(gradients: Sequence[Tensor]) -> None:
                if action.stage:
                    message = Message.gradient_of(action.stage - 1, micro_batch)
                    self.link.send(message, gradients)

            half = action.kind is ActionKind.INPUT  # the gradients of the inputs alone
            with self._parts.weights.collecting(micro_batch) if half else nullcontext():
                stage.backward(micro_batch, given, send)

    def outline(self, batch: MicroBatch) -> Any:
        """Return the model's output as proxies, without computing any block."""
        with self.left.undone(), self.dropout.forward(batch.number), self.inner.running():
            return self._stage.run_ambient(batch)

    def dtype(self, batch: MicroBatch) -> torch.dtype:
        """Return in which dtype a loss is made, the same on every rank: fp32, or fp64 of fp64."""
        dtypes = {meta.dtype for meta in self._stage.ends(batch)}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def finish(
        self,
        stage: Stage,
        batch: MicroBatch,
        given: Mapping[int, Sequence[Tensor]],
        *,
        again: bool = False,
    ) -> Any:
        """Return the model's output for a whole batch whose blocks gave these tensors.

        Args:
            stage: this one.
            batch: whole.
            given: by block.
            again: whether an earlier pass of the whole batch has left all behind.

        Raises:
            UsageError: as in ``Stage.run``; other stages are told that this one fails.
        """
        left = self.left.undone(everything=again)
        with self.telling(), left, self.dropout.forward(batch.number), self.inner.running():
            return stage.finish(batch, given)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Context after whose failure no other stage waits for this one."""
        try:
            yield
        except BaseException:
            self._arrivals.clear()
            self.link.alarm()
            raise

    def run_forwards(
        self, batches: Sequence[MicroBatch], kept: Collection[int] | None
    ) -> dict[int, StageWorker]:
        """Run blocks without backward, by workers of their own; return these, by their stage."""
        workers = {index: self._worker(worker.stage) for index, worker in self.workers.items()}
        for worker in workers.values():
            # One batch alone has its whole output on the last stage.
            goes_on = worker.stage.is_last and len(batches) == 1
            worker.batches, worker.kept = dict(enumerate(batches)), None if goes_on else kept
        self._run(self.actions(ActionKind.FORWARD, range(len(batches))), workers)
        return workers

    def actions(self, kind: ActionKind, numbers: Iterable[int]) -> list[Action]:
        """Return the forwards, or backwards, of micro-batches on this rank, stage after stage."""
        stages, chosen = sorted(self.workers, reverse=kind is ActionKind.BACKWARD), list(numbers)
        return [Action(kind, stage, each) for stage in stages for each in chosen]

    def mark_final(self, actions: Sequence[Action]) -> None:
        """Tell a worker which of its backwards is the last of this rank; without any, none is."""
        for worker in self.workers.values():
            worker.final = worker.final_weight = None
        final = next((action for action in reversed(actions) if action.kind.frees), None)
        if final is None:
            return
        worker = self.workers[final.stage]
        if final.kind is ActionKind.WEIGHT:
            worker.final_weight = final.micro_batch
        else:
            worker.final = final.micro_batch

    def note(self, numbers: Iterable[int], *, counts: bool) -> None:
        """Remember whether the losses of micro-batches count, before their backwards."""
        for worker in self.workers.values():
            (worker.uncounted.difference_update if counts else worker.uncounted.update)(numbers)

    def share(self, values: Tensor, label: str, source: int | None = None) -> None:
        """Give every rank, in place, the values of one stage, of the last unless told otherwise."""
        stage = self.count - 1 if source is None else source
        self._axis.broadcast(values, stage % self.ranks, label=label).wait()

    def agree(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each number over the ranks that decide together.

        These are the ranks of the cell, and those of other replicas that need each other.
        """
        found = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        for axis in self._together:
            axis.all_reduce(found, reduction="max", label="decision of a pipeline").wait()
        return found.tolist()

    def is_new(self, unknown: bool) -> bool:
        """Return whether a kind of call is unknown on this rank, or on a replica that decides too.

        The ranks of a cell get the same calls; other replicas may get batches of another kind.
        """
        return bool(self.agree([unknown])[0]) if self.replicas_decide else unknown

    def output_of(self, like: Tensor, value: Tensor | None, source: int) -> Tensor:
        """Return a tensor of an output with the value that one stage has; others give none."""
        if value is None:
            found = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        else:
            found = value.detach().contiguous()
        self.share(found, "outputs of a stage", source)
        return found

    def refresh(self) -> None:
        """Bring copies of shared parameters up to date, if values have changed.

        Between training and evaluation a script may have swapped values by itself (an average of
        weights). Elsewhere such a change is an error, as the copies' ranks cannot know of it.
        """
        self.link.begin()
        trains = torch.is_grad_enabled()
        if self._stale or trains != self._trained:
            self.shared.refresh(self.inner)
        elif not self.inner.pace.forwards:  # else parameters lie in shards
            with self.telling():
                self.shared.check_unchanged()
        self._stale, self._trained = False, trains

    def outdate(self) -> None:
        """Say that values have changed: copies are made anew before the next forward."""
        self._stale = True

    def free_sent(self) -> None:
        """Free what a forward has sent: no step may ever come, and gloo tells only who waits.

        Other stages put off backwards alone, so gradients may still be on their way.
        """
        self.link.flush(but=Direction.BACKWARD)

    def clear(self, but: Collection[int] = ()) -> None:
        """Forget micro-batches whose backward nobody asked for, but for some."""
        abandoned = [worker.clear(but) for worker in self.workers.values()]
        if any(abandoned):
            self.free_sent()

    def _worker(self, stage: Stage) -> StageWorker:
        is_first_here = stage.index == self.rank
        return StageWorker(stage, self._parts, nullcontext if is_first_here else self.left.undone)


# --- the times of every rank's actions, step by step, as Chrome traces ---


class StepTrace:
    """Collects the spans of all ranks of a pipeline after a step, and writes one file.

    Times of ranks on several hosts are as comparable as the wall clocks of these hosts. The folder
    is made if it is not there. Names of files begin with ``name``; the first pipeline rank writes.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path, name: str, axis: Axis) -> None:
        self._folder, self._name, self._axis = folder, name, axis
        self._step = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"strategy.trace_dir: cannot make {str(folder)!r}: {error.strerror or error}; "
                "choose another folder"
            ) from error

    def save(self, spans: Sequence[Span]) -> None:
        """Write the step that has just ended; a collective over the pipeline."""
        moved = time.time() - time.perf_counter()  # counters of hosts begin anywhere
        mine = [Span(each.action, each.start + moved, each.stop + moved) for each in spans]
        found = gather_facts(mine, list[Span], doing="the trace of a step", group=self._axis)
        self._step += 1
        if self._axis.rank == 0:
            name = f"{self._name}-step{self._step:05d}"
            timeline = Timeline(tuple(map(tuple, found)))
            save_trace(timeline, self._folder / f"{name}.json", name=name)
