"""The warm-up: data parallelism over all workers, before they take steps by themselves.

DiLoCo starts from a model that data parallelism has trained for a while (Douillard et al. 2023,
section 3). So the workers can average gradients for the first steps of an optimizer. At the end of
a backward that synchronises::

    inside of a worker    the strategy inside averages gradients, and hands out each rank's part
    between workers       rank j of each worker averages its part with the ranks j of the others

Every rank then has the gradients of data parallelism over all ranks, up to the order of sums, and
the sums have the same bits on all workers. So weights and states of optimizers stay alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.parts.naming import named_parameters
from drivetrain.parts.replicate import replicate
from drivetrain.parts.rounds import Rounds, on_gradient
from drivetrain.strategy import Strategy
from drivetrain_local.messages import Messages, wide
from drivetrain_local.outer import OuterSteps


class WarmUp:
    """The backwards of a model whose gradients are averaged over all workers for some steps.

    Args:
        inner: the strategy inside of a worker.
        workers: the ranks at this rank's place of each worker.
        outer: of each optimizer, in order; optimizers that are bound later come to this list.
    """

    def __init__(
        self,
        inner: Strategy[Any],
        workers: Communicator,
        outer: Sequence[OuterSteps],
    ) -> None:
        self._inner = inner
        self._workers = workers
        self._outer = outer
        self._model = nn.Module()  # until there is one
        self._synchronizing = True
        self._rounds = Rounds(lambda: None, self._average)
        self._handles: list[RemovableHandle] = []

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
        if not self._averages:
            self._inner.backward(loss, **options)
            return
        rounds = self._rounds.count
        self._inner.backward(loss, **options)
        if self._rounds.count == rounds:
            self._rounds.take_part()  # no parameter got a gradient; other workers may wait
        else:
            self._rounds.finish()

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Context in which backward sends nothing to other workers."""
        before, self._synchronizing = self._synchronizing, not enabled
        try:
            with self._inner.accumulating(enabled):
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
        return self._synchronizing and any(outer.warms_up for outer in self._outer)

    def _came(self, parameter: Tensor) -> None:
        if self._averages:
            self._rounds.enter()

    def _average(self) -> None:
        """End the backward of the strategy inside, and average over the workers. Collective."""
        for _ in self._inner.gradients():
            pass
        for outer in self._outer:
            for members in outer.messages.of() if outer.warms_up else ():
                average_gradients(members, self._workers, outer.messages)
        # As data parallelism does, so that all ranks evaluate with the same buffers.
        replicate(self._model.buffers(), self._workers, "buffers of the first worker")


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
