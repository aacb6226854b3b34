"""Runs a schedule: receives the inputs of an action, computes, sends the result on.

Receives are posted one action ahead, so that a message travels while the rank still computes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from drivetrain_megatron.pipeline.actions import Action, ActionKind, Schedule
from drivetrain_megatron.pipeline.timeline import Span
from drivetrain_megatron.pipeline.transfer import Arrival, Direction, Link, Message, Meta

Send = Callable[[Sequence[Tensor]], None]


class ComputesActions(Protocol):
    """A stage, as the interpreter sees it. Every method is about one micro-batch."""

    def input_metas(self, micro_batch: int) -> Sequence[Meta]:
        """Return the facts of the tensors that come from the stage before."""

    def output_metas(self, micro_batch: int) -> Sequence[Meta]:
        """Return the facts of the gradients that come from the next stage."""

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors for the next stage; none from the last stage."""

    def backward(self, micro_batch: int, gradients: Sequence[Tensor], send: Send) -> None:
        """Run backward, and send the gradients of the inputs as soon as they are there."""

    def backward_input(self, micro_batch: int, gradients: Sequence[Tensor], send: Send) -> None:
        """Run the half of backward that makes the gradients of the inputs."""

    def backward_weight(self, micro_batch: int) -> None:
        """Run the other half."""


class Interpreter:
    """Runs schedules on this rank.

    Args:
        stages: this rank's stages, by index.
        count: how many stages there are on all ranks.
        link: this rank's end of the pipeline.
    """

    def __init__(self, stages: Mapping[int, ComputesActions], count: int, link: Link) -> None:
        self._stages = stages
        self._count = count
        self._link = link
        self._arrivals: dict[Message, Arrival] = {}

    def run(self, schedule: Schedule, rank: int) -> list[Span]:
        """Run this rank's actions.

        Returns:
            When each ran, in seconds of ``time.perf_counter``; waiting for messages is not in it.

        Raises:
            CollectiveError: a neighbor ended or did not send in time.
        """
        return self.run_actions(schedule.ranks[rank])

    def run_actions(
        self, actions: Sequence[Action], stages: Mapping[int, ComputesActions] | None = None
    ) -> list[Span]:
        """Run some actions in order; see ``run``.

        Args:
            actions: of this rank.
            stages: other workers for them; None for those of the interpreter.
        """
        spans = []
        own, self._stages = self._stages, stages or self._stages
        try:
            for index, action in enumerate(actions):
                self._expect(action)
                for following in actions[index + 1 : index + 2]:
                    self._expect(following)
                spans.append(self._do(action))
        except BaseException:
            self._arrivals.clear()
            self._link.reset()
            self._link.alarm()
            raise
        finally:
            self._stages = own
        return spans

    def flush(self) -> None:
        """Return when everything that was sent is through."""
        self._link.flush()

    def _expect(self, action: Action) -> None:
        """Post the receive of an action's inputs from another rank."""
        message = self._needed(action)
        if message is None or message in self._arrivals:
            return
        stage = self._stages[action.stage]
        forward = message.direction is Direction.FORWARD
        if message.source in self._stages and not self._link.is_here(message):
            return  # an action in between makes it
        metas = stage.input_metas if forward else stage.output_metas
        self._arrivals[message] = self._link.receive(message, metas(action.micro_batch))

    def _needed(self, action: Action) -> Message | None:
        if action.kind is ActionKind.FORWARD:
            first = action.stage == 0
            return None if first else Message.input_of(action.stage, action.micro_batch)
        last = action.stage == self._count - 1
        if last or not action.kind.returns:
            return None
        return Message.gradient_of(action.stage, action.micro_batch)

    def _do(self, action: Action) -> Span:
        message = self._needed(action)
        given = self._arrivals.pop(message).wait() if message is not None else ()
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        start = time.perf_counter()
        if action.kind is ActionKind.FORWARD:
            outputs = stage.forward(micro_batch, given)
            if action.stage + 1 < self._count:
                self._link.send(Message.input_of(action.stage + 1, micro_batch), outputs)
        elif action.kind is ActionKind.WEIGHT:
            stage.backward_weight(micro_batch)
        else:
            half = action.kind is ActionKind.INPUT
            run = stage.backward_input if half else stage.backward
            run(micro_batch, given, self._sender(action))
        return Span(action, start, time.perf_counter())

    def _sender(self, action: Action) -> Send:
        def send(gradients: Sequence[Tensor]) -> None:
            if action.stage:
                message = Message.gradient_of(action.stage - 1, action.micro_batch)
                self._link.send(message, gradients)

        return send
