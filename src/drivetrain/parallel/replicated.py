"""Data parallelism with whole state on every rank: the contract but for the average; buckets.

One synchronised backward is a round (``drivetrain.parallel.backward``)::

    first gradient      begin()
    each gradient       gradient_came(parameter): may send what is complete, while backward goes on
    end of backward     average(): sends the rest, and waits; then rank 0's buffers replace the
                        others', so that every rank evaluates with the same ones

A subclass says how gradients are averaged, and what that costs.

Makes tensors equal to rank 0's: parameters and buffers at first, buffers after backward.

Flat gradient buckets: many parameters' gradients side by side in one tensor that is sent whole.

A bucket's flat tensor ends in a tail of one element per parameter, 1 when this rank has a gradient
for it and 0 when not. The tail is reduced with the rest, so that every rank learns without another
message whether any rank had a gradient for a parameter::

    | gradient of p0 | gradient of p1 | gradient of p2 | has p0 | has p1 | has p2 |
"""

import itertools
import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
import torch.autograd.grad_mode
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.collectives.volume import FlatSlice, ParameterRow
from drivetrain.compression.communicator import connect_linked
from drivetrain.config.outline import ReplicasOutline
from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import UsageError
from drivetrain.model.modules import (
    UninheritedHook,
    held_buffers,
    held_parameters,
    named_parameters,
)
from drivetrain.parallel.backward import (
    Rounds,
    check_alike,
    clip_,
    global_norm,
    grouped,
    on_gradient,
    sum_of_words,
)
from drivetrain.saved_state import ReplicatedState
from drivetrain.shards import is_dense
from drivetrain.strategy import Gradients, Joinable, Only, Pace, Prepared, Run, Strategy

# --- tensors that share memory: who moves parameters would untie them without a word ---


def check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are trained and share elements with others, or among themselves.

    One process would update all of them by a step of one. In memory of their own they would part.

    Args:
        tensors: parameters and buffers by name, each object once; any shapes and strides.

    Raises:
        UsageError: names the tensors.
    """
    sharing: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            if tensor.requires_grad and distinct(tensor).numel() != tensor.numel():
                raise UsageError(
                    f"expected parameters with a place in memory for each element, found {name!r}, "
                    "which is expanded: no optimizer can update it; train what it is expanded "
                    "from, or a clone() of it"
                )
            sharing[tensor.untyped_storage()._cdata].append((name, tensor))
    for members in sharing.values():
        if len(members) > 1:
            _check_storage(members)


def distinct(tensor: Tensor) -> Tensor:
    """Return the elements of an expanded tensor that lie at different places."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _check_storage(members: Sequence[tuple[str, Tensor]]) -> None:
    near: list[tuple[str, Tensor]] = []
    for name, tensor in sorted(members, key=lambda member: _span(member[1])):
        near = [(other, one) for other, one in near if _span(one)[1] > _span(tensor)[0]]
        for other, one in near:
            if (one.requires_grad or tensor.requires_grad) and _meet(one, tensor):
                raise UsageError(
                    f"expected parameters with memory of their own, found {other!r} and {name!r}, "
                    "which share elements without being one parameter; tie weights by the "
                    "parameter itself (head.weight = embedding.weight), or clone() one of them"
                )
        near.append((name, tensor))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _meet(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors whose spans overlap have an element in common."""
    if one.itemsize != other.itemsize:
        return True
    spans = _span(one), _span(other)
    first, stop = (edge // one.itemsize for edge in (min(spans)[0], max(s[1] for s in spans)))
    taken = torch.zeros(stop - first, dtype=torch.bool, device="cpu")
    _place(taken, distinct(one), first).fill_(True)
    return bool(_place(taken, other, first).any())


def _place(taken: Tensor, tensor: Tensor, first: int) -> Tensor:
    return taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first)


# --- equal values ---


MOST_BYTES = 32 << 20
"""Most bytes in one message: no exchange of a model's state needs a second model in memory."""

SizedT = TypeVar("SizedT")


def replicate(
    tensors: Iterable[Tensor], communicator: Communicator, label: str, *, source: int = 0
) -> None:
    """Copy tensors from one rank, tensors of equal dtype and device together.

    Args:
        tensors: any shapes and strides, expanded ones too; the same on every rank.
        communicator: over the ranks that hold a copy.
        label: name of the messages in errors.
        source: index on the axis of the rank that has the right values.
    """
    if communicator.size == 1:
        return
    with torch.no_grad():
        alike = grouped(distinct(tensor.detach()) for tensor in tensors).values()
        for group in itertools.chain.from_iterable(map(batched, alike)):
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            communicator.broadcast(flat, source, label=label).wait()
            if communicator.rank != source:
                _scatter(flat, group)


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        piece = flat[offset : offset + tensor.numel()].view(tensor.shape)
        # A buffer that autograd saved in an earlier forward stays valid for its backward.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):
            tensor.copy_(piece)
        offset += tensor.numel()


def batched(
    items: Iterable[SizedT],
    most: int | None = None,
    nbytes_of: Callable[[SizedT], int] = attrgetter("nbytes"),
) -> Iterator[list[SizedT]]:
    """Yield items in order, as many at a time as have at most so many bytes together, or one.

    Args:
        items: small ones share a message.
        most: bytes; by default ``MOST_BYTES``.
        nbytes_of: tells the bytes of an item.
    """
    most = MOST_BYTES if most is None else most
    batch: list[SizedT] = []
    filled = 0
    for item in items:
        if batch and filled + nbytes_of(item) > most:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += nbytes_of(item)
    if batch:
        yield batch


class ForwardHook(UninheritedHook):
    """A forward pre-hook that acts before training forwards, in the model itself only.

    Args:
        action: called, without arguments, before each training forward with gradients.
    """

    def __call__(self, *arguments: Any) -> None:
        """Act before a training forward, but not when a checkpoint recomputes it in backward."""
        recomputing = torch._C._current_graph_task_id() != -1
        training = arguments[0].training and torch.is_grad_enabled()
        if self._action is not None and training and not recomputing:
            self._action()


# --- data parallelism with whole state on every rank ---


class WholeGradients(Gradients):
    """The gradients of ordinary parameters, after a backward the same on all ranks.

    Args:
        parameters: of the model, each once.
        finish: called before they are read.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], finish: Callable[[], None] = lambda: None
    ) -> None:
        self._parameters = tuple(parameters)
        self._finish = finish

    def __call__(self, only: Only = None) -> Iterator[Tensor]:
        """Yield the gradients of all parameters, without None."""
        self._finish()
        chosen = self._parameters if only is None else only
        return (parameter.grad for parameter in chosen if parameter.grad is not None)

    def clip(self, max_norm: float, norm_type: float = 2.0, *, only: Only = None) -> Tensor:
        """Scale the gradients to a norm of at most max_norm."""
        gradients, device = list(self(only)), next((p.device for p in self._parameters), None)
        norm = global_norm(gradients, norm_type, device=device)
        clip_(gradients, norm, max_norm)
        return norm


ConfigT = TypeVar("ConfigT")

_ADAM_STATES = 2
"""An optimizer with this many states is Adam, which also counts steps per parameter."""


class ReplicatedStrategy(ReplicasOutline[ConfigT], Strategy[ConfigT], Generic[ConfigT]):
    """Whole models over the mesh axis ``dp``; one object per prepared model.

    ``prepare`` returns the very objects it was given: everything happens in hooks.

    Attributes:
        model: the user's model.
        parameters: its parameters, each once.
        ranks: the axis, whose collectives are counted.
        rounds: the synchronised backwards.
        hooked: the hooks of parameters whose gradients the next round averages.
        closing: takes off what was made, the latest first.
    """

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    state: ReplicatedState

    def __init__(self, config: ConfigT, run: Run) -> None:
        super().__init__(config, run)
        self.ranks = connect_linked(run.mesh, "dp", run.traffic, run.world, run.links)
        self.rounds = Rounds(self.begin, self.after_backward)
        self.closing = ExitStack()
        self.closing.callback(self.ranks.close)
        self.hooked: dict[nn.Parameter, RemovableHandle] = {}
        self._leader = 0
        """Whose buffers the others get: rank 0's, or those of a rank that has a batch."""

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Make the ranks' parameters and buffers equal to rank 0's and hook into backward."""
        self.model = model
        self.parameters = tuple(held_parameters(model))
        self.gradients = WholeGradients(self.parameters, self.rounds.finish)
        self.state = ReplicatedState(model, (), self.ranks.rank, self.ranks.size)
        replicate([*self.parameters, *model.buffers()], self.ranks, "replicate model")
        if self.ranks.size > 1:
            self.closing.callback(self._let_go)
            self.follow()
            handle = model.register_forward_pre_hook(ForwardHook(self.before_forward))
            self.closing.callback(handle.remove)
        return Prepared(model, tuple(map(self.bind, optimizers)))

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Save, load and step one more optimizer."""
        self.state.add(optimizer)
        before = optimizer.register_step_pre_hook(lambda *_: self._before_step(optimizer))
        after = optimizer.register_step_post_hook(lambda *_: self.rounds.stepped(optimizer))
        for handle in (before, after):
            self.closing.callback(handle.remove)
        return optimizer

    def _before_step(self, optimizer: Optimizer) -> None:
        """End a round; where none has come, see that all ranks have the script's gradients."""
        self.rounds.finish()
        if self.ranks.size == 1 or self.rounds.came_since(optimizer):
            return
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        nothing = torch.zeros((), dtype=torch.int64)
        sums = {
            name: nothing if parameter.grad is None else sum_of_words(parameter.grad)
            for name, parameter in named_parameters(self.model).items()
            if id(parameter) in held
        }
        check_alike(sums, self.ranks, self.run.world.device)

    # --- one step, in its order ---

    def before_forward(self) -> None:
        """End a round that an exception in backward cut short, and see who trains now."""
        if self.rounds.synchronizing:
            self.rounds.finish()
            self.follow()

    def follow(self) -> None:
        """Follow changes of ``requires_grad``, which must be the same on every rank."""
        for parameter in self.parameters:
            if parameter.requires_grad is (parameter in self.hooked):
                continue
            if parameter not in self.hooked:
                hook = partial(self._came, parameter)
                self.hooked[parameter] = on_gradient(parameter, hook)
            elif not self.rounds.kept:  # else it was frozen with gradients that wait
                self.hooked.pop(parameter).remove()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless accumulating, return with averaged gradients."""
        run = partial(loss.backward, **options)
        if self.ranks.size == 1 or not self.rounds.synchronizing:
            self.rounds.kept = True
            run()
            return
        self.follow()
        self.rounds.run(run)

    def _came(self, parameter: nn.Parameter, _: Tensor) -> None:
        if self.rounds.synchronizing:
            self.rounds.enter()
            self.gradient_came(parameter)
        else:
            self.rounds.kept = True

    def _let_go(self) -> None:
        self.rounds.give_up()
        for handle in self.hooked.values():
            handle.remove()

    def begin(self) -> None:
        """Begin a round; by default there is nothing to make ready."""

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """Take a gradient that autograd has accumulated; by default wait for the others."""

    @abstractmethod
    def average(self) -> None:
        """End a round: every parameter's gradient is the mean over the ranks.

        A gradient that some ranks lack counts as zeros; one that all ranks lack stays None, so that
        no momentum moves the parameter. All ranks must send in the same order.
        """

    def after_backward(self) -> None:
        """Average, and let buffers follow rank 0's."""
        self.average()
        label = "buffers after backward"
        replicate(held_buffers(self.model).values(), self.ranks, label, source=self._leader)

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Keep gradients local inside."""
        before, self.rounds.synchronizing = self.rounds.synchronizing, not enabled
        try:
            yield
        finally:
            self.rounds.synchronizing = before

    @property
    def pace(self) -> Pace:
        """All ranks step together; gradients may wait for a round."""
        return Pace(waits=self.rounds.kept and self.ranks.size > 1)

    # --- ranks that run out of batches ---

    @property
    def joinable(self) -> Joinable | None:
        """Whole models reduce zeros, and take over all of a rank's state."""
        return self

    @property
    def synchronizes(self) -> bool:
        """Whether a backward now is a round."""
        return self.rounds.synchronizing

    def lead(self, source: int, *, gradients: bool) -> None:
        """Take over gradients of one rank, whose buffers the others get from now on."""
        self._leader = self.run.mesh["dp"].ranks.index(source)
        if not gradients:
            return
        here = [parameter.grad is not None for parameter in self.parameters]
        there = torch.tensor(here, device=self.run.world.device).int()
        self.ranks.broadcast(there, self._leader, label="gradients at hand").wait()
        for parameter, found in zip(self.parameters, there.tolist(), strict=True):
            if not found:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        found = [each.grad for each in self.parameters if each.grad is not None]
        replicate(found, self.ranks, "gradients at hand", source=self._leader)

    def stand_in(self) -> None:
        """Reduce gradients and broadcast buffers as the others do, with zeros."""
        self.before_forward()
        zero = torch.zeros((), device=self.run.world.device, requires_grad=True)
        self.backward(zero)

    def catch_up(self, source: int) -> None:
        """Take over parameters, buffers and optimizer state of one rank.

        Raises:
            UsageError: some ranks have optimizer state that others lack.
        """
        tensors = self.state.tensors()
        index = self.run.mesh["dp"].ranks.index(source)
        count = torch.tensor([len(tensors), -len(tensors)], device=self.run.world.device)
        self.ranks.all_reduce(count, reduction="max", label="state of ranks").wait()
        most, least = int(count[0]), -int(count[1])
        if most != least:
            raise UsageError(
                f"expected optimizer state on every rank, found {least} to {most} tensors; give "
                "every rank at least one step"
            )
        replicate(tensors, self.ranks, "take over state", source=index)
        self._leader = 0

    def close(self) -> None:
        """Take the hooks off and end the communication thread; gradients stay readable."""
        self.closing.close()

    @staticmethod
    def whole(
        model: ModelSpec, sent: Mapping[tuple[str, str], int], gradients: int | None = None
    ) -> Cost:
        """Return the cost of whole state.

        Args:
            model: parameters, buffers and states.
            sent: bytes that rank 0 sends per step by (axis, operation).
            gradients: bytes of gradients, and of what is held to average them; None: the former.
        """
        trainable = [spec for spec in model.parameters if spec.trainable]
        trained = sum(spec.nbytes for spec in trainable)
        steps = 4 * len(trainable) if model.states >= _ADAM_STATES else 0
        return Cost(
            held={
                "parameters": sum(spec.nbytes for spec in model.parameters),
                "gradients": trained if gradients is None else gradients,
                "optimizer": model.states * trained + steps,
                "buffers": sum(spec.nbytes for spec in model.buffers),
            },
            sent={key: nbytes for key, nbytes in sent.items() if nbytes},
        )


# --- flat gradient buckets ---


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The parameters of a bucket, as cost estimates see them.

    Attributes:
        members: indices of its parameters in the sequence that was planned, in order.
        shapes: their shapes.
        dtype: their dtype.
    """

    members: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the flat tensor, the tail included."""
        return sum(torch.Size(shape).numel() for shape in self.shapes) + len(self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.numel * self.dtype.itemsize

    def flat_slice(self, names: Sequence[str], dtype: torch.dtype | None = None) -> FlatSlice:
        """Describe the flat tensor; the tail belongs to no parameter.

        Args:
            names: of all parameters in the sequence that was planned.
            dtype: in which the gradients are sent; None: their own.
        """
        starts = itertools.accumulate((prod(shape) for shape in self.shapes), initial=0)
        rows = [
            ParameterRow(names[member], shape, 0, start)
            for member, shape, start in zip(self.members, self.shapes, starts, strict=False)
        ]
        return FlatSlice.of(self.numel, dtype or self.dtype, rows)


def plan_buckets(
    shapes: Sequence[tuple[int, ...]],
    kinds: Sequence[tuple[torch.dtype, Hashable]],
    order: Sequence[int],
    *,
    bucket_bytes: int,
    first_bytes: int,
) -> list[BucketLayout]:
    """Cut parameters into buckets of one kind each.

    Args:
        shapes: shape of each parameter.
        kinds: dtype and device of each parameter; only equal kinds share a bucket.
        order: indices of the parameters in the order in which their gradients become ready.
        bucket_bytes: most bytes of gradients in a bucket; a larger parameter is alone in one.
        first_bytes: most bytes in the first bucket of each kind, which should start early.

    Returns:
        The buckets in the order in which their last gradient becomes ready.
    """
    groups: list[list[int]] = []
    latest: dict[tuple[torch.dtype, Hashable], list[int]] = {}
    sizes: dict[tuple[torch.dtype, Hashable], int] = {}
    limits: dict[tuple[torch.dtype, Hashable], int] = {}
    for index in order:
        kind = kinds[index]
        nbytes = torch.Size(shapes[index]).numel() * kind[0].itemsize
        if kind not in latest or sizes[kind] + nbytes > limits[kind]:
            limits[kind] = bucket_bytes if kind in latest else first_bytes
            latest[kind], sizes[kind] = [], 0
            groups.append(latest[kind])
        latest[kind].append(index)
        sizes[kind] += nbytes
    position = {index: place for place, index in enumerate(order)}
    groups.sort(key=lambda members: position[members[-1]])
    return [
        BucketLayout(tuple(members), tuple(tuple(shapes[i]) for i in members), kinds[members[0]][0])
        for members in groups
    ]


class Bucket:
    """One flat tensor and its views.

    Args:
        layout: of the parameters.
        parameters: in order.
        names: of all parameters in the sequence that was planned.

    Attributes:
        layout: of the parameters.
        names: of all parameters in the sequence that was planned.
        parameters: in order.
        flat: 1-D, the gradients and the tail.
        views: a view of ``flat`` per parameter, with its shape and, when dense, its strides.
        flags: the tail of ``flat``.
    """

    def __init__(
        self, layout: BucketLayout, parameters: Sequence[nn.Parameter], names: Sequence[str]
    ) -> None:
        self.layout = layout
        self.names = names
        self.parameters = tuple(parameters)
        self.flat = torch.zeros(layout.numel, dtype=layout.dtype, device=parameters[0].device)
        sizes = [parameter.numel() for parameter in parameters]
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._backward = -1
        self._look()

    def leave_kept(self, place: int, references: int = 0) -> bool:
        """Take other memory where the script keeps gradients, or views of them, that it cleared.

        For the moment before a gradient arrives at its place. Gradients that were not cleared move
        along as the same objects, and channels of ``flat`` go on with the new memory.

        Args:
            place: of the gradient.
            references: those of the strategy to each view, beside the bucket's own.

        Returns:
            Whether some of ``views`` are others now.
        """
        places: Sequence[int] = (place,)
        alone = references + self._alone
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # the script has had a say since the last arrival
            places, self._backward = range(len(self.views)), backward
            if _tensors_in(self.flat) > self._tensors:
                return self._leave()
        for each in places:
            gone = self.parameters[each].grad is not self.views[each]
            if gone and sys.getrefcount(self.views[each]) > alone:
                return self._leave()
        return False

    def _leave(self) -> bool:
        pairs = list(zip(self.parameters, self.views, strict=True))
        self.flat.set_(torch.empty_like(self.flat))  # type: ignore[call-overload]
        self._look()
        for place, (parameter, old) in enumerate(pairs):
            if parameter.grad is old:
                new = self.views[place].copy_(old)
                old.set_(new.untyped_storage(), new.storage_offset(), new.shape, new.stride())
                self.views[place] = old
        return True

    def _look(self) -> None:
        self.views = [self.view(place) for place in range(len(self.parameters))]
        self._alone = max(sys.getrefcount(self.views[i]) for i in range(len(self.views)))
        self.flags = self.flat[self._starts[-1] :]
        self._tensors = _tensors_in(self.flat)

    def view(self, place: int) -> Tensor:
        """Return the place of a parameter's gradient.

        To autograd it is no view of another tensor: scripts call ``detach_()`` on gradients.
        """
        view = view_like(self.flat, self._starts[place], self.parameters[place])
        return self.flat.new_empty(0).set_(
            view.untyped_storage(), view.storage_offset(), view.shape, view.stride()
        )


def _tensors_in(flat: Tensor) -> int:
    """Return how many tensors have the memory of a flat one."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


def view_like(flat: Tensor, offset: int, tensor: Tensor) -> Tensor:
    """Return a view of a 1-D tensor from an offset on, with another tensor's shape.

    The view has the tensor's strides too when these are dense (as after ``channels_last`` or a
    transposition); otherwise it is contiguous.
    """
    piece = flat[offset : offset + tensor.numel()]
    if is_dense(tensor):
        return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())
    return piece.view(tensor.shape)
