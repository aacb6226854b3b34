"""The strategy ``ddp``: replicas that average gradients while backward runs.

Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2 (buckets, overlap with backward).
One synchronised backward is a round::

    first hook          begin: count down from all parameters of every bucket
    each hook           move the fresh gradient into its bucket, count down
    bucket at zero      launch it, and the complete ones after it: always in bucket order
    end of backward     flush: zeros for missing gradients, launch the rest, wait for the sums

The end of backward is noticed by a callback of the autograd engine, by the strategy after
``backward``, or at the latest before the optimizer steps; the first of the three ends the round. A
round that an exception cut short is ended when the next round begins, so that every rank has sent
every bucket.

An eager round multiplies each gradient by 1/N on the way into its bucket. The first
round, which observes the order, and every round of a model under reentrant checkpointing, where a
gradient may come more than once, multiply and send all buckets at the end. A rank that comes to
such checkpointing in an eager round sends the rest of the buckets at its end.

``hook: powersgd`` sums a bucket as the method ``powersgd`` of slow links does (Vogels, Karimireddy,
Jaggi, "PowerSGD", NeurIPS 2019), between all ranks. Vectors, matrices that factors would not make
smaller and the tail are sent whole. Gradients come divided by N already, so sums are means, and a
rank keeps its error in units of 1/N.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from drivetrain.collectives import Communicator, Handle, Route, chunk_bounds
from drivetrain.collectives.communicator import SumChannel
from drivetrain.collectives.volume import FlatSlice, SlicesByRank
from drivetrain.compression.communicator import hosts_apart, route_linked
from drivetrain.compression.compressor import (
    Compressor,
    Followed,
    OnWire,
    Rounded,
    as_it_is,
    is_finite,
)
from drivetrain.compression.error_feedback import LinkChannel, take_kept
from drivetrain.compression.methods import LinkMethods
from drivetrain.compression.one_bit_adam import (
    FrozenAdam,
    frozen_adam,
    refuse_clipping,
)
from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import ConfigError, UsageError
from drivetrain.hardware.sizes import MIB
from drivetrain.model.modules import named_parameters
from drivetrain.parallel.backward import Rounds, on_gradient
from drivetrain.parallel.replicated import (
    Bucket,
    BucketLayout,
    ReplicatedStrategy,
    WholeGradients,
    plan_buckets,
)
from drivetrain.registry import compressors
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.saved_state import ReplicatedState
from drivetrain.shards import Reader, Shard
from drivetrain.strategy import (
    DataParallelPlanning,
    Form,
    Joinable,
    Only,
    Planning,
    Prepared,
    Run,
)
from drivetrain_ddp.options import DdpConfig, DdpOutline

if TYPE_CHECKING:
    from drivetrain.simulator.contract import Sharing
    from drivetrain.simulator.step import SimulatedRun

# --- a bucket on the wire ---

Finish: TypeAlias = Callable[[], object]
"""Returns when a bucket's flat tensor, tail included, holds the sum over ranks."""


class CommunicationHook:
    """Turns a full bucket into its sum over the ranks; subclasses compress the message.

    Gradients are divided by N before. ``start`` is called for the same buckets in the same order on
    every rank, and so are the functions that ``start`` returns.

    Args:
        on_wire: maps the dtype of gradients to the dtype in which they are sent and summed.
    """

    def __init__(self, on_wire: OnWire = as_it_is) -> None:
        self._on_wire = on_wire
        self._channels: dict[BucketLayout, SumChannel] = {}

    def start(self, bucket: Bucket, communicator: Communicator) -> Finish:
        """Start to sum a bucket over the ranks.

        Args:
            bucket: gradients / N and tail, complete; views without a gradient are zero.
            communicator: the data-parallel axis.
        """
        self.open(bucket, communicator)
        return self._channels[bucket.layout](bucket.flat).wait

    def open(self, bucket: Bucket, communicator: Communicator) -> None:
        """Make the channel of a bucket, unless it is there: a checkpoint may be about to come."""
        if bucket.layout not in self._channels:
            self._channels[bucket.layout] = self._channel(bucket, communicator)

    def _channel(self, bucket: Bucket, communicator: Communicator) -> SumChannel:
        """Return the sums of a bucket."""
        crossing = Rounded([bucket.flat], self._on_wire)
        flat_slice = self._flat_slice(bucket.layout, bucket.names)
        channel = communicator.gradients_summed(flat_slice, "gradient bucket")

        def start(_: Tensor) -> Handle:
            crossing.leave()
            return Followed(channel(*crossing.sent), crossing.arrive)

        return start

    def _flat_slice(self, layout: BucketLayout, names: Sequence[str]) -> FlatSlice:
        """Describe a bucket as it crosses."""
        return layout.flat_slice(names, self._on_wire(layout.dtype))

    def sent(
        self, layout: BucketLayout, names: Sequence[str], route: Route
    ) -> Counter[tuple[str, str]]:
        """Return the bytes that a rank sends for a bucket per step, by (axis, operation).

        Args:
            layout: of the bucket.
            names: of all parameters in the sequence that was planned.
            route: the way of data over the data-parallel axis.
        """
        return route.gradients_summed(self._flat_slice(layout, names))

    def held(self, layout: BucketLayout, names: Sequence[str], route: Route) -> int:
        """Return the bytes that are held for a bucket's messages between steps."""
        flat_slice = self._flat_slice(layout, names)
        rounded = 0 if flat_slice.dtype == layout.dtype else flat_slice.nbytes
        return rounded + route.kept_back(flat_slice)

    def forget(self) -> None:
        """Drop the state of every bucket: the buckets are about to change."""
        self._channels.clear()


# --- powerSGD ---


class PowerSgdHook(CommunicationHook):
    """Sums buckets of fp32 and fp64 as matrices of low rank.

    Args:
        rank: columns of the factors.
        start_step: how many sums of each bucket are plain before compression starts; again so
            after a change of the buckets.
        on_wire: maps the dtype of gradients to the dtype in which all is sent.
    """

    def __init__(self, rank: int, start_step: int, on_wire: OnWire) -> None:
        super().__init__(on_wire)
        kind = compressors().load("powersgd")
        self._method: Compressor[Any] = kind(
            kind.Config(rank=rank), between_ranks=True, on_wire=on_wire
        )
        self._start_step = start_step

    @override
    def _channel(self, bucket: Bucket, communicator: Communicator) -> SumChannel:
        exact, size = partial(super()._channel, bucket, communicator), communicator.size
        pieces = self._pieces(bucket.layout, bucket.names, size)
        if not self._method.approximates(pieces):
            return exact()
        reduction = self._method.reduction(communicator, pieces, everywhere=True)
        lengths = [part[0].numel for part in pieces]
        spans = bucket.layout.flat_slice(bucket.names).spans

        def give_back() -> None:
            # Where no rank had a gradient no parameter is updated: what came are errors alone.
            flags = bucket.flags.tolist()
            unused = {span.name: span for span, flag in zip(spans, flags, strict=True) if not flag}
            for kept in reduction.feedback():
                if span := unused.get(kept.span.name):
                    values = bucket.flat[span.start : span.stop]
                    if is_finite(values):
                        kept.errors.add_(values, alpha=1 / size)

        def approximate(flat: Tensor) -> Handle:
            parts = [[each] for each in flat.split_with_sizes(lengths)]  # its memory may be renewed
            summed = reduction.start(parts, first=lambda: None, label="powersgd")
            return Followed(summed, give_back)

        def first(flat: Tensor) -> Handle:
            return exact()(flat)  # for one sum: no rounded bucket is held when compression starts

        channel = LinkChannel(first, self._start_step)
        channel.take_method(reduction, spans, approximate)
        return channel

    @override
    def sent(
        self, layout: BucketLayout, names: Sequence[str], route: Route
    ) -> Counter[tuple[str, str]]:
        pieces = self._pieces(layout, names, route.axis.size)
        if not self._method.approximates(pieces):
            return super().sent(layout, names, route)
        return self._method.sent(route, pieces, everywhere=True)

    @override
    def held(self, layout: BucketLayout, names: Sequence[str], route: Route) -> int:
        pieces = self._pieces(layout, names, route.axis.size)
        if not self._method.approximates(pieces):
            return super().held(layout, names, route)
        return self._method.held(route.axis, pieces, everywhere=True)

    def _pieces(self, layout: BucketLayout, names: Sequence[str], size: int) -> SlicesByRank:
        """Return a piece of the bucket for each rank, about as long, with whole parameters."""
        flat_slice = layout.flat_slice(names)
        if layout.dtype not in (torch.float32, torch.float64):  # factors of others would be noise
            flat_slice = replace(flat_slice, spans=())
        edges = []
        for edge, _ in chunk_bounds(flat_slice.numel, size):
            at = bisect_right(flat_slice.spans, edge, key=lambda span: span.start) - 1
            inside = at >= 0 and edge < flat_slice.spans[at].stop
            edges.append(flat_slice.spans[at].start if inside else edge)
        return [[flat_slice.cut(*each)] for each in pairwise([*edges, flat_slice.numel])]


# --- the compression that the options choose ---


def hook_of(config: DdpConfig, precision: Precision) -> CommunicationHook:
    """Return the hook that the options name, or a cast to the policy's dtype."""
    if precision.reduce is not None:
        return CommunicationHook(precision.reduce_dtype)
    if config.hook == "powersgd":
        on_wire = _on_wire(config.powersgd_dtype)
        return PowerSgdHook(config.powersgd_rank, config.powersgd_start_step, on_wire)
    return CommunicationHook(_on_wire(config.hook))


def _on_wire(word: str) -> OnWire:
    """Return the dtype on the wire for each dtype of gradients: wider ones are narrowed."""
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(word)
    if narrow is None:
        return as_it_is
    return lambda dtype: dtype if dtype.is_complex or dtype.itemsize <= narrow.itemsize else narrow


# --- averages gradients over ranks while backward runs ---


@dataclass(slots=True, eq=False)
class BucketSlot:
    """One parameter's place in the buckets; it outlives a change of the buckets.

    Attributes:
        index: position in registration order among the trainable parameters.
        name: the parameter's name, for messages.
        parameter: the parameter.
        round: the round in which its gradient last came.
        place: index of the view in the bucket.
        view: the range of the bucket that holds its gradient, in the parameter's shape.
        address: where this range begins in memory.
        bucket: the bucket of the view.
    """

    index: int
    name: str
    parameter: nn.Parameter
    round: int = 0
    place: int = 0
    view: Tensor = field(init=False)
    address: int = field(init=False)
    bucket: "_BucketRound" = field(init=False)

    def adopt(self, grad: Tensor | None, scale: float = 1.0) -> None:
        """Make the bucket's view the parameter's gradient, with the values of ``grad`` x scale.

        Raises:
            UsageError: the gradient is sparse, or part of an autograd graph.
        """
        if grad is None:
            return
        if grad.requires_grad or grad.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self.name!r} is "
                + ("part of a graph" if grad.requires_grad else f"{grad.layout}")
                + ", expected a dense one outside of autograd; use torch.autograd.grad for "
                "gradients of gradients, and sparse=False for embeddings"
            )
        self.bucket.leave_kept(self.place)
        if scale == 1.0:
            self.view.copy_(grad)
        else:
            torch.mul(grad, scale, out=self.view)  # copy and average in one pass over memory
        self.parameter.grad = self.view


@dataclass(slots=True)
class _BucketRound:
    """A bucket and its progress in the current round.

    Attributes:
        bucket: the flat tensor and its views.
        slots: its parameters.
        pending: how many of its gradients have not come.
        missing: places of parameters without any gradient on this rank.
        finish: waits for the sum over ranks; None before launch.
    """

    bucket: Bucket
    slots: list[BucketSlot]
    pending: int
    missing: list[int]
    finish: Finish | None = None

    def leave_kept(self, place: int) -> None:
        """Leave gradients that the script keeps, before one arrives; views are others then."""
        if self.bucket.leave_kept(place, references=1):
            for slot, view in zip(self.slots, self.bucket.views, strict=True):
                slot.view, slot.address = view, view.data_ptr()


class BucketReducer:
    """Owns the buckets and the parameter hooks of one model.

    Args:
        parameters: the model's parameters by name, in registration order.
        communicator: the data-parallel axis.
        hook: the compression of buckets on the wire.
        config: bucket sizes.
        rounds: the synchronised backwards of the model.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        communicator: Communicator,
        hook: CommunicationHook,
        config: DdpConfig,
        rounds: Rounds,
    ) -> None:
        self.rounds, rounds.cut_short = rounds, self._refuse
        self._parameters = [parameter for _, parameter in parameters]
        self._names = [name for name, _ in parameters]
        self._communicator = communicator
        self._hook = hook
        self._config = config
        self._handles: list[RemovableHandle] = []
        self._scale = 1.0 / communicator.size
        self._eager = False
        self._launched = 0
        self._trainable: list[bool] | None = None
        self.follow()

    # --- the buckets ---

    def follow(self, *, within: bool = False) -> None:
        """Follow changes of ``requires_grad``, which must be the same on every rank.

        Args:
            within: in the middle of a window: what was frozen since may have gradients to average.
        """
        before = self._trainable if within else None
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if before is not None:
            trainable = [each or was for each, was in zip(trainable, before, strict=True)]
        if trainable == self._trainable:
            return
        self.rounds.finish()
        self.close()
        self._trainable = trainable
        chosen = [index for index, wanted in enumerate(trainable) if wanted]
        self._slots = [
            BucketSlot(place, self._names[index], self._parameters[index])
            for place, index in enumerate(chosen)
        ]
        self._handles = [
            on_gradient(slot.parameter, self._make_hook(slot))
            for slot in self._slots
            if slot.parameter.requires_grad
        ]
        self._observed: list[int] | None = None
        self._observing = True
        self._order: Sequence[int]
        self._buckets: list[_BucketRound]
        self._build(list(range(len(self._slots)))[::-1])

    def open_channels(self) -> None:
        """Make the channels now, before the first round: a checkpoint is about to be loaded."""
        for state in self._buckets:
            self._hook.open(state.bucket, self._communicator)

    def close(self) -> None:
        """Take the hooks off; gradients stay in buckets."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _build(self, order: Sequence[int]) -> None:
        """Lay buckets out in an order; where memory runs out for them, those of before stay."""
        parameters = [slot.parameter for slot in self._slots]
        layouts = buckets_of(
            self._config,
            [tuple(parameter.shape) for parameter in parameters],
            [(parameter.dtype, parameter.device) for parameter in parameters],
            order,
        )
        names = [slot.name for slot in self._slots]
        buckets = [
            Bucket(layout, [parameters[member] for member in layout.members], names)
            for layout in layouts
        ]
        self._hook.forget()
        self._communicator.renew_channels()
        self._order, self._buckets = order, []
        for bucket in buckets:
            slots = [self._slots[member] for member in bucket.layout.members]
            state = _BucketRound(bucket, slots, 0, [])
            self._buckets.append(state)
            for place, (slot, view) in enumerate(zip(slots, bucket.views, strict=True)):
                slot.bucket, slot.place, slot.view = state, place, view
                slot.address = view.data_ptr()

    # --- during backward ---

    def _make_hook(self, slot: BucketSlot) -> Callable[[Tensor], None]:
        """Return a parameter's hook: a closure, the cheapest call for each parameter and step."""

        def ready(parameter: Tensor) -> None:
            if not self.rounds.synchronizing:
                self.rounds.kept = True
                if parameter.grad is not slot.view:
                    slot.adopt(parameter.grad)
                return
            self.rounds.enter()
            if slot.round == self.rounds.count:
                self._came_again(slot)
            if self._eager and self.rounds.reentrant:
                self._hold_back()
            grad, scale = parameter.grad, self._scale if self._eager else 1.0
            if grad is not slot.view:
                slot.adopt(grad, scale)
            elif scale != 1.0:
                slot.view.mul_(scale)
            self._count_down(slot)

        return ready

    def begin(self) -> None:
        """Begin a round: count down from all parameters of every bucket."""
        if self._observed is not None:
            self._build(self._observed)
            self._observed = None
        self._eager = not self._observing and not self.rounds.reentrant
        self._launched = 0
        self._came: list[int] = []
        for state in self._buckets:
            state.pending = len(state.slots)
            state.missing.clear()
            state.finish = None
            for slot in state.slots:
                if slot.view.data_ptr() != slot.address:
                    self._bring_back(slot)

    def _refuse(self) -> None:
        self.rounds.give_up()
        raise UsageError(
            "expected a forward, or accelerator.backward(loss), after a backward that an exception "
            "has ended, found loss.backward(), which adds to gradients that are on their way to "
            "other ranks; call accelerator.backward(loss)"
        )

    def _bring_back(self, slot: BucketSlot) -> None:
        """Put a gradient into its bucket again after ``p.grad.data = tensor``."""
        given, parameter = slot.view, slot.parameter
        place = slot.bucket.bucket.views
        slot.view = place[slot.place] = slot.bucket.bucket.view(slot.place)
        if parameter.grad is given:
            slot.view.copy_(given)
            parameter.grad = slot.view

    def _count_down(self, slot: BucketSlot) -> None:
        if slot.round == self.rounds.count:
            return
        slot.round = self.rounds.count
        self._came.append(slot.index)
        slot.bucket.pending -= 1
        if not slot.bucket.pending and self._eager:
            self._launch_complete()

    def _came_again(self, slot: BucketSlot) -> None:
        """Note a second gradient of a parameter; then buckets are sent at the end of backward.

        Raises:
            UsageError: the gradient's bucket may be on its way already.
        """
        self.rounds.reentrant = True
        if self._eager or slot.bucket.finish is not None:
            raise UsageError(
                f"{slot.name!r} got its gradient twice in one backward, which it did not in the "
                "first one; use torch.utils.checkpoint with use_reentrant=False for a module "
                "whose parameters are used elsewhere too"
            )

    def _hold_back(self) -> None:
        """Send what is not on its way at the end of this backward: gradients may come again."""
        self._eager = False
        for state in self._buckets[self._launched :]:
            for slot in state.slots:
                if slot.round == self.rounds.count:
                    slot.view.div_(self._scale)

    def _launch_complete(self) -> None:
        # In bucket order, not in order of completion: all ranks must send the same sequence.
        while self._launched < len(self._buckets):
            state = self._buckets[self._launched]
            if state.pending:
                return
            self._launch(state)

    def _launch(self, state: _BucketRound) -> None:
        # First, since memory may run out for what crosses: then the bucket waits, as it was.
        self._hook.open(state.bucket, self._communicator)
        if state.pending:
            self._fill(state)
        if not self._eager:
            state.bucket.flat.mul_(self._scale)
        state.bucket.flags.fill_(1)
        for place in state.missing:
            state.bucket.flags[place] = 0
        self._communicator.before_sums_without([state.slots[p].name for p in state.missing])
        self._launched += 1
        state.finish = self._hook.start(state.bucket, self._communicator)

    def _fill(self, state: _BucketRound) -> None:
        """Complete a bucket: a gradient of earlier micro-batches counts, a missing one is zero."""
        scale = self._scale if self._eager else 1.0
        for slot in state.slots:
            if slot.round == self.rounds.count:
                continue
            grad = slot.parameter.grad
            if grad is None:
                state.leave_kept(slot.place)
                slot.view.zero_()
                state.missing.append(slot.place)
            elif grad is not slot.view:
                slot.adopt(grad, scale)
            elif scale != 1.0:
                grad.mul_(scale)

    # --- after backward ---

    def end(self) -> None:
        """End a round: launch the rest, wait for the sums."""
        for state in self._buckets[self._launched :]:
            self._launch(state)
        for state in self._buckets:
            self._await_sum(state)
            state.finish = None
        if self._observing:
            self._observe()

    def _await_sum(self, state: _BucketRound) -> None:
        if state.finish is None:
            return
        state.finish()
        if not state.missing:
            return
        flags = state.bucket.flags.tolist()
        for place in state.missing:
            # Without a gradient on any rank the gradient stays None: optimizers must not step.
            if flags[place] != 0:
                state.slots[place].parameter.grad = state.slots[place].view
            else:
                self._communicator.give_back({state.slots[place].name})

    def _observe(self) -> None:
        """Agree on rank 0's order for the next rounds; one bucket per dtype needs no order."""
        self._observing = False
        kinds = {(slot.parameter.dtype, slot.parameter.device) for slot in self._slots}
        if len(self._buckets) == len(kinds):
            return
        came = set(self._came)
        rest = [index for index in self._order if index not in came]
        order = torch.tensor(self._came + rest, device=self._slots[0].parameter.device)
        self._communicator.broadcast(order, label="order of gradients").wait()
        observed = order.tolist()
        if observed != self._order:
            self._observed = observed


# --- the strategy ``ddp`` ---


class DdpGradients(WholeGradients):
    """Gradients whose sums may keep errors, or are those of momenta.

    Args:
        ddp: the prepared strategy.
    """

    def __init__(self, ddp: "Ddp") -> None:
        super().__init__(ddp.parameters, ddp.rounds.finish)
        self._ranks, self._adam = ddp.ranks, ddp._adam

    def will_scale(self, factor: float) -> None:
        """Let momenta have the factor before they cross."""
        if self._adam:
            self._adam.factor = factor or 1.0  # times 0 nothing is left to take care of

    def clip(self, max_norm: float, norm_type: float = 2.0, *, only: Only = None) -> Tensor:
        """Scale the gradients to a norm of at most max_norm.

        Raises:
            UsageError: momenta are exchanged.
        """
        refuse_clipping(self._adam)
        return super().clip(max_norm, norm_type, only=only)

    def step_decided(self, *, taken: bool) -> None:
        """Let sums that keep errors go on, or back to those of before a skipped step."""
        self._ranks.step_decided(taken=taken)


class DdpState(ReplicatedState):
    """What every rank holds whole, and what sums over links keep.

    Args:
        ddp: the prepared strategy.
        optimizers: of the model.
    """

    def __init__(self, ddp: "Ddp", optimizers: Sequence[Optimizer]) -> None:
        super().__init__(ddp.model, optimizers, ddp.ranks.rank, ddp.ranks.size)
        self._ddp = ddp

    def shards(self) -> Iterator[Shard]:
        """Yield the tensors that this rank saves, and what its sums keep."""
        yield from super().shards()
        yield from self._ddp.ranks.kept()

    def load(self, reader: Reader) -> None:
        """Load everything on every rank, in place."""
        super().load(reader)
        self._ddp._reducer.open_channels()
        take_kept([self._ddp.ranks], reader, self._ddp.run.links.name_for("gradients"))


class Ddp(DdpOutline, ReplicatedStrategy[DdpConfig]):
    """Data parallelism over the mesh axis ``dp``; one object per prepared model."""

    def __init__(self, config: DdpConfig, run: Run) -> None:
        super().__init__(config, run)
        far = hosts_apart(run.mesh, "dp", run.world, run.links) is not None
        self._adam = frozen_adam("ddp", config.exchange, run.links, far=far)
        self._hook = MomentumHook(self._adam) if self._adam else hook_of(config, run.precision)
        if self._adam:
            self.closing.callback(self._adam.close)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Lay out the buckets, and hook into backward."""
        parameters = [] if self.ranks.size == 1 else list(named_parameters(model).items())
        self._reducer = BucketReducer(parameters, self.ranks, self._hook, self.config, self.rounds)
        self.closing.callback(self._reducer.close)
        prepared = super().prepare(model, optimizers)
        self.gradients, self.state = DdpGradients(self), DdpState(self, prepared.optimizers)
        return prepared

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Save, load and step one more optimizer.

        Raises:
            ConfigError: momenta are exchanged, and the optimizer is no plain Adam or AdamW.
        """
        if self._adam:
            self._adam.check(optimizer)
        super().bind(optimizer)
        if self._adam:
            self._adam.add(optimizer)
        return optimizer

    def follow(self) -> None:
        """Follow changes of ``requires_grad``: the reducer's hooks are on the parameters."""
        self._reducer.follow(within=self.rounds.kept)

    def begin(self) -> None:
        """Count down from all parameters of every bucket."""
        self._reducer.begin()

    def average(self) -> None:
        """Launch the buckets that are left, and wait for all sums."""
        self._reducer.end()

    def after_backward(self) -> None:
        """Average; buffers follow rank 0's if they are to."""
        if self.config.buffers == "broadcast":
            super().after_backward()
        else:
            self.average()

    @property
    def joinable(self) -> Joinable | None:
        """Zeros stand for gradients; momenta go on with steps, which a rank must take itself."""
        return None if self._adam else self

    def take_links(self, links: LinkMethods) -> None:
        """Let the buckets go on with methods that were chosen between two steps."""
        super().take_links(links)
        self.ranks.take_links(links)

    @classmethod
    def cost(cls, config: DdpConfig, model: ModelSpec, run: Run) -> Cost:
        """Return the cost of a step with one synchronised backward.

        Buckets are laid out in reverse registration order; the observed order changes no more than
        the rounding of the ring's chunks. PowerSGD counts as started.
        """
        route = route_linked(run.mesh, "dp", run.world, run.links)
        trainable = [spec for spec in model.parameters if spec.trainable]
        names = [spec.name for spec in trainable]
        shapes = [spec.shape for spec in trainable]
        kinds = [(spec.dtype, None) for spec in trainable]
        order = range(len(trainable))[::-1]
        layouts = buckets_of(config, shapes, kinds, order) if route.axis.size > 1 else []
        hook, sent, gradients = hook_of(config, run.precision), Counter[tuple[str, str]](), 0
        for layout in layouts:
            sent += hook.sent(layout, names, route)
            gradients += layout.nbytes + hook.held(layout, names, route)
        if config.buffers == "broadcast":
            sent += route.broadcast(sum(spec.nbytes for spec in model.buffers))
        return cls.whole(model, sent, gradients if route.axis.size > 1 else None)

    @classmethod
    def planning(cls) -> Planning:
        """Return plans of whole state, and of all-reduces beside the last backward."""
        return DdpPlanning(cls, _sharing)


class DdpPlanning(DataParallelPlanning):
    """Plans of whole state, whose gradients may cross links in other forms."""

    def changes_links(self, config: DdpConfig) -> bool:
        """Return True: every channel goes on with methods that are chosen later."""
        return True

    def candidates(self, world: World) -> Sequence[Form]:
        """Return gradients as they are, and of low rank where hosts are connected by a network."""
        compressed = [Form({"hook": "powersgd"}, exact=False)] if world.spans_hosts else []
        return [Form(), *compressed]


def buckets_of(
    config: DdpConfig,
    shapes: Sequence[tuple[int, ...]],
    kinds: Sequence[tuple[torch.dtype, Hashable]],
    order: Sequence[int],
) -> list[BucketLayout]:
    """Return the buckets of the sizes that the options name; see ``plan_buckets``."""
    return plan_buckets(
        shapes,
        kinds,
        order,
        bucket_bytes=int(config.bucket_mib * MIB),
        first_bytes=int(min(config.first_bucket_mib, config.bucket_mib) * MIB),
    )


def _sharing(config: DdpConfig, run: "SimulatedRun") -> "Sharing":
    if config.hook != "none":
        raise ConfigError(
            f"expected hook: none in a simulated step, found {config.hook}: the time of "
            "compression is not drawn; leave hook out"
        )
    from drivetrain.simulator.contract import Sharing  # loaded by who plans

    return Sharing(bucket=round(config.bucket_mib * MIB))


# --- A bucket on the wire after the warm-up of 1-bit Adam ---


class MomentumHook(CommunicationHook):
    """Sums momenta over the ranks, for parameters whose variance is frozen; the others' gradients.

    Args:
        adam: has the momenta.
    """

    def __init__(self, adam: FrozenAdam) -> None:
        super().__init__()
        self._adam = adam

    @override
    def start(self, bucket: Bucket, communicator: Communicator) -> Finish:
        gradients = dict(zip(bucket.parameters, bucket.views, strict=True))
        turn_back = self._adam.exchange(gradients, communicator.size)
        wait = super().start(bucket, communicator)

        def finish() -> None:
            wait()
            turn_back()

        return finish
