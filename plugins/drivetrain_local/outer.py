"""The outer steps of one optimizer's parameters: DiLoCo, and Streaming DiLoCo.

Douillard et al. 2023, algorithm 1, and Douillard et al. 2025, algorithm 2. In the order of events,
for outer weights o, a worker's weights w, K workers::

    before a step     o <- w, where there are none: all workers start alike, also after a warm-up
    t                 d <- mean over workers of o - w         sent beside the steps until t + delay
    t + delay         m <- momentum m + d
                      o <- o - lr (d + momentum m)            Nesterov's momentum
                      w <- keep w + (1 - keep) o

All workers compute the same o and m from the same d, bit by bit, so neither is ever sent; only a
worker that came late to an exchange takes both from the store, see ``sync.LateWorkers``.

Streaming DiLoCo (2025, section 2.1) exchanges groups of blocks that are not neighbors: block i is
of fragment i mod P. Parameters outside of blocks are of the first fragment, such as embeddings, or
of the last, such as a head, by their place before or behind the blocks.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from drivetrain.collectives import Communicator, Handle
from drivetrain.collectives.communicator import Finished, SumChannel
from drivetrain.collectives.volume import FlatSlice, ParameterRow
from drivetrain.model.modules import held_buffers, named_parameters, repeated_blocks
from drivetrain.parallel.backward import Rounds, on_gradient
from drivetrain.parallel.replicated import replicate, view_like
from drivetrain.saved_state import AROUND, TrainingState
from drivetrain.shards import HeldPart
from drivetrain.strategy import Strategy
from drivetrain_local.options import LocalOptions
from drivetrain_local.sync import LateWorkers


def fragment_of_each(model: nn.Module | None, names: Iterable[str], count: int) -> dict[str, int]:
    """Return the fragment of each parameter by name.

    Args:
        model: the user's model; None where only names are known, which then take turns.
        names: of the parameters.
        count: of the fragments.
    """
    if count == 1:
        return dict.fromkeys(names, 0)
    blocks = [] if model is None else repeated_blocks(model)
    if not blocks:
        return {name: index % count for index, name in enumerate(names)}
    found: Mapping[str, int] = {
        f"{prefix}.{name}": index % count
        for index, (prefix, block) in enumerate(blocks)
        for name in named_parameters(block)
    }
    fragments, reached = {}, False
    for name in names:
        reached = reached or name in found
        fragments[name] = found.get(name, count - 1 if reached else 0)
    return fragments


def steps_since(options: LocalOptions, fragment: int, steps: int) -> int:
    """Return how many steps ago the latest exchange of a fragment started."""
    turn = fragment * options.every // options.fragments
    return (steps - turn) % options.every


# --- messages between workers about the tensors that one optimizer steps ---


class MessageChannel(NamedTuple):
    """A channel of sums, and its tensors at this time.

    Attributes:
        flat_slice: describes the flat tensor of a sum.
        channel: takes the sums.
    """

    flat_slice: FlatSlice
    channel: SumChannel


@dataclass(eq=False, slots=True)
class Messages:
    """The tensors of each message between workers, and the channels of their sums.

    Args:
        optimizer: of the strategy inside; its tensors may be this rank's parts of parameters.
        model: the user's one.
        inner: the strategy inside.
        workers: the ranks at this rank's place of each worker.
        parts: what the modules of this rank have of each parameter, by name.
        fragments: gives the fragment of a parameter, by name.
    """

    optimizer: Optimizer
    model: nn.Module
    inner: Strategy[Any]
    workers: Communicator
    parts: Mapping[str, HeldPart]
    fragments: Mapping[str, int]
    _channels: dict[tuple[int, torch.dtype, str], MessageChannel] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where messages lie; tensors in stores may lie elsewhere."""
        return self.inner.run.world.device

    def names(self) -> Mapping[int, str]:
        """Return the name of every tensor that optimizers hold, by identity."""
        own = {id(p): name for name, p in named_parameters(self.model).items()}
        return {**own, **self.inner.state.names()}

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of a tensor's values, on all workers the same."""
        return self.inner.state.dtype(parameter)

    def held(self) -> Iterator[nn.Parameter]:
        """Yield the tensors in the optimizer's groups, frozen ones, too."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the tensors that the optimizer steps now."""
        yield from (each for each in self.held() if each.requires_grad)

    def held_parts(self) -> Iterator[tuple[str, str]]:
        """Yield (name, word of the part) of each part of which the optimizer holds elements."""
        names = self.names()
        for parameter in self.held():
            yield (name := names[id(parameter)]), self.parts[name].word

    def of(
        self, fragment: int | None = None, also: Collection[nn.Parameter] = ()
    ) -> Sequence[Sequence[nn.Parameter]]:
        """Return the tensors of each message: of one fragment, or of all.

        Args:
            fragment: None for all.
            also: tensors that are in a message although they are frozen.

        Returns:
            Trainable tensors, and those of ``also``.

        A message has tensors of one dtype, from parts that the same ranks of the worker have: so
        these ranks get the same bits, whatever else each of them has. The order is that of the
        model's parameters, whatever the optimizer's groups.
        """
        names = self.names()
        stepped = {names[id(p)]: p for p in self.held() if p.requires_grad or p in also}
        found: dict[tuple[torch.dtype, str], list[nn.Parameter]] = {}
        for name in self.parts:
            if name in stepped and fragment in (None, self.fragments[name]):
                kind = self._kind(stepped[name], names)
                found.setdefault(kind, []).append(stepped[name])
        return list(found.values())

    def channel(self, fragment: int, members: Sequence[nn.Parameter]) -> SumChannel:
        """Return the channel of a message's sums; errors of a method are kept in the channel.

        Once other tensors are in the message, a new channel goes on with the errors of the old one.
        """
        names, dtype = self.names(), wide(self.dtype(members[0]))
        pieces = [self._flat_slice(names[id(parameter)], parameter, dtype) for parameter in members]
        flat_slice = FlatSlice.joined(pieces, dtype)
        key = fragment, *self._kind(members[0], names)
        before = self._channels.get(key)
        if before is None or before.flat_slice != flat_slice:
            made = self.workers.gradients_summed(
                flat_slice, "outer gradients", None if before is None else before.channel
            )
            self._channels[key] = MessageChannel(flat_slice, made)
        return self._channels[key].channel

    def _kind(self, parameter: nn.Parameter, names: Mapping[int, str]) -> tuple[torch.dtype, str]:
        """Return the dtype and the word of the part, which the tensors of a message share."""
        return self.dtype(parameter), self.parts[names[id(parameter)]].word

    def _flat_slice(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> FlatSlice:
        """Describe a tensor in a message: a piece of a matrix is encoded as part of the matrix."""
        shape, outer_dim, first, numel = self.inner.state.piece(parameter)
        whole = FlatSlice.of(prod(shape), dtype, [ParameterRow(name, shape, outer_dim, 0)])
        return whole.cut(first, first + numel)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which outer gradients of a dtype are added up."""
    return torch.promote_types(dtype, torch.float32)


# --- outer steps ---


OUTER, MOMENTUM, UNDER_WAY = AROUND
"""Keys of the state of a parameter."""


@dataclass(slots=True)
class OuterExchange:
    """An exchange under way.

    Attributes:
        due: the step after which its result is taken.
        among: the workers that take part.
        gradients: the mean of the workers' outer gradients, once the handles are done.
        handles: of the sums.
    """

    due: int
    among: Communicator
    gradients: dict[nn.Parameter, Tensor]
    handles: Sequence[Handle] = (Finished(),)

    def wait(self) -> None:
        """Return when the sums are there."""
        for handle in self.handles:
            handle.wait()


class StepCount:
    """The steps of an optimizer, which a checkpoint keeps.

    Attributes:
        steps: that the optimizer has taken.
    """

    def __init__(self) -> None:
        self.steps = 0

    def after_step(self, *_: Any) -> None:
        """Count a step."""
        self.steps += 1

    def resume(self, steps: int) -> None:
        """Go on counting."""
        self.steps = steps


class OuterSteps(StepCount):
    """The outer weights and their momentum, for the parameters that one optimizer steps.

    Args:
        options: the knobs.
        messages: of the optimizer, between workers.
        late: for each fragment, the exchanges that leave out late workers; none to wait for all.

    Attributes:
        state: of each tensor, by key: outer weights and momentum.
        messages: as given.
        buffers: those of the first worker replace the others' at the end of a round.
        late: as given.
    """

    def __init__(
        self, options: LocalOptions, messages: Messages, late: Sequence[LateWorkers] = ()
    ) -> None:
        super().__init__()
        self.optimizer = messages.optimizer
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.buffers: Sequence[Tensor] = ()
        self._options = options
        self.messages = messages
        self._workers = messages.workers
        self.late = late
        self._round_buffers: list[Tensor] = []
        self._flights: dict[int, OuterExchange] = {}
        self._warm_up = options.warmup_steps
        self._apart = False

    # --- around a step ---

    @property
    def warms_up(self) -> bool:
        """Whether the next step is one of data parallelism over all workers."""
        return self.steps < self._warm_up

    @property
    def _held(self) -> TrainingState:
        return self.messages.inner.state

    @property
    def _local(self) -> int:
        """How many steps the workers have taken by themselves: rounds are counted from there."""
        return self.steps - self._warm_up

    def before_all(self, *_: Any) -> None:
        """Remember where the workers start from, before a store inside takes the step."""
        if self._held.take_changes(self.optimizer):
            self.before_step()

    @torch.no_grad()
    def before_step(self, *_: Any) -> None:
        """Remember where the workers start from."""
        for parameter in () if self.warms_up else self.messages.parameters():
            if parameter not in self.state:
                self.state[parameter] = {OUTER: self._held.values(parameter).clone()}

    @override
    @torch.no_grad()
    def after_step(self, *_: Any) -> None:
        """Count a step; start the exchanges of this moment, and end the exchanges that are due."""
        super().after_step()
        if self._local <= 0:
            return
        for fragment in range(self._options.fragments):
            if not steps_since(self._options, fragment, self._local):
                self.land(fragment)  # what a checkpoint of other options has left
                self._exchange(fragment)
            if fragment in self._flights and self._flights[fragment].due <= self.steps:
                self.land(fragment)

    def _exchange(self, fragment: int) -> None:
        """Exchange with the workers that take part."""
        if not self.late:
            self._flights[fragment] = self._launch(fragment, self._workers)
            return
        outer = partial(self._outer_state, fragment)
        late = self.late[fragment]
        if late.exchange(partial(self._step_among, fragment), outer):
            for members in self._members(fragment):
                for parameter in members:
                    self._held.set_values(parameter, self.state[parameter][OUTER])
        if fragment == 0 and late.idle:  # buffers belong to the outer weights that readers see
            for buffer, kept in zip(self.buffers, self._round_buffers, strict=True):
                buffer.copy_(kept)
        elif fragment == 0:
            self._round_buffers = [buffer.detach().clone() for buffer in self.buffers]

    def _step_among(self, fragment: int, among: Communicator) -> None:
        self._flights[fragment] = self._launch(fragment, among)
        self.land(fragment)

    def _outer_state(self, fragment: int) -> Sequence[Tensor]:
        """Return all tensors that an exchange changes: a late worker needs no others."""
        members = [parameter for each in self._members(fragment) for parameter in each]
        outer = [self.state[parameter][OUTER] for parameter in members]
        momentum = [self._momentum(parameter) for parameter in members]
        return [*outer, *momentum, *(self.buffers if fragment == 0 else ())]

    def _members(self, fragment: int) -> Sequence[Sequence[nn.Parameter]]:
        """Return the tensors of each message: a frozen one until all workers have the same."""
        return self.messages.of(fragment, also=self.state)

    def _launch(self, fragment: int, among: Communicator) -> OuterExchange:
        """Start to take the mean of the outer gradients of some workers."""
        flight = OuterExchange(self.steps + self._options.delay, among, {}, handles := [])
        for members in self._members(fragment):
            flat = self._outer_gradients(members, flight)
            # A sum of shares of the mean: so no later reader needs to know how many workers it had.
            flat.div_(among.size)
            if among is self._workers:
                handles.append(self.messages.channel(fragment, members)(flat))
            else:  # methods for slow links keep errors for a sum of all workers: this one is exact
                handles.append(among.all_reduce(flat, label="outer gradients"))
        return flight

    def _outer_gradients(self, members: Sequence[nn.Parameter], flight: OuterExchange) -> Tensor:
        """Return how far this worker has come from the outer weights, 1-D, for a message.

        Tensors lie side by side, each in the order of its memory; the exchange gets views of them.
        """
        dtype = wide(self.messages.dtype(members[0]))
        numel = sum(parameter.numel() for parameter in members)
        flat, edge = torch.empty(numel, dtype=dtype, device=self.messages.device), 0
        for parameter in members:
            outer, values = self.state[parameter][OUTER], self._held.values(parameter)
            view = flight.gradients[parameter] = view_like(flat, edge, values)
            view.copy_(outer.to(dtype) - values)
            edge += values.numel()
        return flat

    @torch.no_grad()
    def land(self, fragment: int) -> None:
        """Take the result of an exchange, if one is under way: step the outer weights."""
        flight = self._flights.pop(fragment, None)
        if flight is None:
            return
        flight.wait()
        if fragment == 0:
            replicate(self.buffers, flight.among, "buffers of the first worker")
        options = self._options
        momentum, lr, keep = options.outer_momentum, options.outer_lr, options.keep
        for parameter, received in flight.gradients.items():
            state = self.state[parameter]
            mean = received.to(state[OUTER].device)
            velocity = self._momentum(parameter).to(mean.dtype).mul_(momentum).add_(mean)
            state[MOMENTUM].copy_(velocity)
            outer = state[OUTER].to(mean.dtype).sub_(mean.add_(velocity, alpha=momentum), alpha=lr)
            state[OUTER].copy_(outer)
            # Not a sum of shares: without a share kept, all workers get the same bits.
            frozen = not parameter.requires_grad
            if keep and not frozen:
                outer = torch.lerp(outer, self._held.values(parameter).to(outer.dtype), keep)
            self._held.set_values(parameter, outer)
            if frozen and not self.late:  # a worker that comes late takes the state of all tensors
                del self.state[parameter]

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        """Return the outer momentum of a parameter, zeros before its first outer step."""
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(state[OUTER])
        return state[MOMENTUM]

    # --- state for checkpoints, and for readers of whole weights ---

    def shown(self) -> None:
        """Put the outer state among the optimizer's, as of this moment."""
        for flight in self._flights.values():
            flight.wait()
            for parameter, mean in flight.gradients.items():
                self.state[parameter][UNDER_WAY] = mean
        for parameter, state in self.state.items():
            self.optimizer.state[parameter].update(state)

    def hidden(self) -> None:
        """Take it out again: optimizers look whether they have any state."""
        for parameter, state in self.state.items():
            inner = self.optimizer.state[parameter]
            for key in (OUTER, MOMENTUM, UNDER_WAY):
                inner.pop(key, None)
            if not inner:
                del self.optimizer.state[parameter]
            state.pop(UNDER_WAY, None)

    def taken_over(self, *, apart: bool) -> None:
        """Take outer state of a checkpoint out of the optimizer's state, in place of the old.

        Afterwards the channels of all exchanges are there, to go on with errors of the checkpoint.

        Args:
            apart: whether the workers of the checkpoint had taken steps by themselves.
        """
        self._apart = apart
        self.state.clear()
        for flight in self._flights.values():
            flight.wait()
        self._flights.clear()
        for parameter in self.messages.held():
            inner = self.optimizer.state.get(parameter, {})
            found = {key: inner[key] for key in (OUTER, MOMENTUM, UNDER_WAY) if key in inner}
            if found:
                self.state[parameter] = found
        flying = {p: state[UNDER_WAY] for p, state in self.state.items() if UNDER_WAY in state}
        self.hidden()
        for fragment in range(self._options.fragments):
            for members in self._members(fragment):
                self.messages.channel(fragment, members)
                dtype = wide(self.messages.dtype(members[0]))
                for parameter in (each for each in members if each in flying):
                    begun = OuterExchange(self._due(fragment), self._workers, {})
                    flight = self._flights.setdefault(fragment, begun)
                    flight.gradients[parameter] = flying[parameter].to(dtype)

    @override
    def resume(self, steps: int) -> None:
        """Go on counting; exchanges that a checkpoint was taken in the middle of end in time."""
        super().resume(steps)
        # Workers that have taken steps by themselves differ: a longer warm-up comes too late.
        self._warm_up = self._options.warmup_steps
        if self._apart:
            self._warm_up = min(self._warm_up, steps)
        for fragment, flight in self._flights.items():
            flight.due = self._due(fragment)

    def _due(self, fragment: int) -> int:
        """Return the step after which the latest exchange of a fragment ends."""
        return self.steps - steps_since(self._options, fragment, self._local) + self._options.delay

    def restart(self, names: frozenset[str]) -> None:
        """Let outer weights follow values that the script has written into parameters. Collective.

        All workers take those of the first one: the script has written what forward reads, and the
        digits of masters beyond may differ.
        """
        held = self.messages.names()
        for parameter, state in self.state.items():
            if held.get(id(parameter)) in names:
                whole = self._held.values(parameter).to(self.messages.device, copy=True)
                replicate([whole], self._workers, "outer weights")
                state[OUTER].copy_(whole)


# --- warm-up: data parallelism over all workers, before they take steps by themselves ---

# DiLoCo starts from a model that data parallelism has trained for a while (Douillard et al. 2023,
# section 3). So the workers can average gradients for the first steps of an optimizer. At the end
# of a backward that synchronises::
#
#     inside of a worker    the strategy inside averages gradients, and hands out each rank's part
#     between workers       rank j of each worker averages its part with the ranks j of the others
#
# Every rank then has the gradients of data parallelism over all ranks, up to the order of sums, and
# the sums have the same bits on all workers. So weights and states of optimizers stay alike.


@dataclass(eq=False)
class WarmUp:
    """The backwards of a model whose gradients are averaged over all workers for some steps.

    Args:
        inner: the strategy inside of a worker.
        workers: the ranks at this rank's place of each worker.
        outer: of each optimizer, in order; optimizers that are bound later come to this list.
    """

    inner: Strategy[Any]
    workers: Communicator
    outer: Sequence[OuterSteps]
    _model: nn.Module = field(default_factory=nn.Module)  # until there is one
    _synchronizing: bool = True
    _handles: list[RemovableHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rounds = Rounds(lambda: None, self._average)

    def follow(self, model: nn.Module) -> None:
        """Notice backwards that reach a model, also from the loss of another model."""
        self._model = model
        self._handles += [
            on_gradient(parameter, self._came)
            for parameter in named_parameters(model).values()
            if parameter.requires_grad
        ]

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless accumulating, return with gradients averaged over all workers.

        After the warm-up, gradients are averaged over the worker.
        """
        run = partial(self.inner.backward, loss, **options)
        if self._averages:
            self._rounds.run(run)
        else:
            self._rounds.kept = True
            run()

    @property
    def waits(self) -> bool:
        """Whether gradients wait for the worker, or in the warm-up for the others."""
        return self.inner.pace.waits or (self._rounds.kept and self._warms_up)

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Context in which backward sends nothing to other workers."""
        before, self._synchronizing = self._synchronizing, not enabled
        try:
            with self.inner.accumulating(enabled):
                yield
        finally:
            self._synchronizing = before

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._rounds.give_up()

    @property
    def _averages(self) -> bool:
        return self._synchronizing and self._warms_up

    @property
    def _warms_up(self) -> bool:
        return any(outer.warms_up for outer in self.outer)

    def _came(self, parameter: Tensor) -> None:
        if self._averages:
            self._rounds.enter()
        else:
            self._rounds.kept = True

    def _average(self) -> None:
        """End the backward of the strategy inside, and average over the workers. Collective."""
        for _ in self.inner.gradients():
            pass
        for outer in self.outer:
            for members in outer.messages.of() if outer.warms_up else ():
                average_gradients(members, self.workers, outer.messages)
        # As data parallelism does, so that all ranks evaluate with the same buffers.
        buffers = held_buffers(self._model).values()
        replicate(buffers, self.workers, "buffers of the first worker")


@torch.no_grad()
def average_gradients(
    parameters: Sequence[nn.Parameter], workers: Communicator, messages: Messages
) -> None:
    """Replace gradients by their means over workers, in place. Collective.

    A gradient that some workers lack counts as zeros there; one that all workers lack stays None.

    Args:
        parameters: of one dtype, alike on all workers.
        workers: those that average.
        messages: between workers; gradients for a store lie in host memory.
    """
    dtype, device = wide(messages.dtype(parameters[0])), messages.device
    pieces = [
        torch.zeros(each.numel(), dtype=dtype, device=device)
        if each.grad is None
        else each.grad.reshape(-1).to(device, dtype)
        for each in parameters
    ]
    present = torch.tensor([each.grad is not None for each in parameters], dtype=dtype)
    flat = torch.cat([*pieces, present.to(device)])
    edge = flat.numel() - len(parameters)
    flat[:edge].div_(workers.size)
    workers.all_reduce(flat, label="gradients of the warm-up").wait()
    means = flat[:edge].split_with_sizes([piece.numel() for piece in pieces])
    for parameter, mean, holders in zip(parameters, means, flat[edge:].tolist(), strict=True):
        if not holders:
            continue
        if parameter.grad is None:
            parameter.grad = _like(parameter)
        parameter.grad.copy_(mean.view(parameter.shape))


def _like(parameter: nn.Parameter) -> Tensor:
    """Return memory for a gradient, also of a parameter whose values lie in a store."""
    facts = tuple(parameter.shape), parameter.stride()
    return torch.empty_strided(*facts, dtype=parameter.dtype, device=parameter.device)
