"""The outer steps of one optimizer's parameters: DiLoCo, and Streaming DiLoCo.

Douillard et al. 2023, algorithm 1, and Douillard et al. 2025, algorithm 2. In the order of events,
for outer weights o, a worker's weights w, K workers::

    before a step     o <- w, where there are none: all workers start alike, also after a warm-up
    t                 d <- mean over workers of o - w         sent beside the steps until t + delay
    t + delay         m <- momentum m + d
                      o <- o - lr (d + momentum m)            Nesterov's momentum
                      w <- keep w + (1 - keep) o

All workers compute the same o and m from the same d, bit by bit, so neither is ever sent; only a
worker that came late to an exchange takes both from the store, see ``late``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from drivetrain.collectives import Communicator, Handle
from drivetrain.collectives.handles import Finished
from drivetrain.parts.buckets import view_like
from drivetrain.parts.replicate import replicate
from drivetrain.parts.saved_state import AROUND
from drivetrain.shards import HeldTensors
from drivetrain.strategy import Strategy
from drivetrain_local.fragments import is_exchanged, steps_since
from drivetrain_local.late import LateWorkers
from drivetrain_local.messages import Messages, wide
from drivetrain_local.options import LocalOptions

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
        optimizer: of the strategy inside; its tensors may be this rank's parts of parameters.
        options: the knobs.
        inner: the strategy inside.
        workers: the ranks at this rank's place of each worker.
        messages: between them.
        late: for each fragment, the exchanges that leave out late workers; none to wait for all.

    Attributes:
        state: of each tensor, by key: outer weights and momentum.
        messages: as given.
        buffers: those of the first worker replace the others' at the end of a round.
        late: as given.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        options: LocalOptions,
        inner: Strategy[Any],
        workers: Communicator,
        messages: Messages,
        late: Sequence[LateWorkers] = (),
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.buffers: Sequence[Tensor] = ()
        self._options = options
        self.messages = messages
        self._inner = inner
        self._workers = workers
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
    def _held(self) -> HeldTensors:
        return self._inner.held_tensors

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
            if is_exchanged(self._options, fragment, self._local):
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
        momentum, lr, keep = (
            self._options.outer_momentum,
            self._options.outer_lr,
            self._options.keep,
        )
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
