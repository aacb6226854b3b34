"""The messages between workers about the tensors that one optimizer steps."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.collectives import Communicator
from drivetrain.collectives.channels import SumChannel
from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain.parts.naming import named_parameters
from drivetrain.shards import HeldPart
from drivetrain.strategy import Strategy


class MessageKey(NamedTuple):
    """Tells the messages of one optimizer apart.

    Attributes:
        fragment: of the model.
        dtype: of the tensors.
        word: of the parts.
    """

    fragment: int
    dtype: torch.dtype
    word: str


class MessageChannel(NamedTuple):
    """A channel of sums, and its tensors at this time.

    Attributes:
        stretch: describes the flat tensor of a sum.
        channel: takes the sums.
    """

    stretch: Stretch
    channel: SumChannel


class Messages:
    """The tensors of each message between workers, and the channels of their sums.

    Args:
        optimizer: of the strategy inside; its tensors may be this rank's parts of parameters.
        model: the user's one.
        inner: the strategy inside.
        workers: the ranks at this rank's place of each worker.
        parts: what the modules of this rank have of each parameter, by name.
        fragments: gives the fragment of a parameter, by name.

    Attributes:
        device: of messages; tensors in stores may lie elsewhere.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        inner: Strategy[Any],
        workers: Communicator,
        parts: Mapping[str, HeldPart],
        fragments: Mapping[str, int],
    ) -> None:
        self.device = inner.run.world.device
        self._optimizer = optimizer
        self._model = model
        self._inner = inner
        self._workers = workers
        self._parts = parts
        self._fragments = fragments
        self._channels: dict[MessageKey, MessageChannel] = {}

    def names(self) -> Mapping[int, str]:
        """Return the name of every tensor that optimizers hold, by identity."""
        own = {id(p): name for name, p in named_parameters(self._model).items()}
        return {**own, **self._inner.names()}

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of a tensor's values, on all workers the same."""
        return self._inner.held_tensors.dtype(parameter)

    def held(self) -> Iterator[nn.Parameter]:
        """Yield the tensors in the optimizer's groups, frozen ones, too."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the tensors that the optimizer steps now."""
        yield from (each for each in self.held() if each.requires_grad)

    def held_parts(self) -> Iterator[tuple[str, str]]:
        """Yield (name, word of the part) of each part of which the optimizer holds elements."""
        names = self.names()
        for parameter in self.held():
            yield (name := names[id(parameter)]), self._parts[name].word

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
        for name in self._parts:
            if name in stepped and fragment in (None, self._fragments[name]):
                kind = self._kind(stepped[name], names)
                found.setdefault(kind, []).append(stepped[name])
        return list(found.values())

    def channel(self, fragment: int, members: Sequence[nn.Parameter]) -> SumChannel:
        """Return the channel of a message's sums; errors of a method are kept in the channel.

        Once other tensors are in the message, a new channel goes on with the errors of the old one.
        """
        names, dtype = self.names(), wide(self.dtype(members[0]))
        pieces = [self._stretch(names[id(parameter)], parameter, dtype) for parameter in members]
        stretch = Stretch.joined(pieces, dtype)
        key = MessageKey(fragment, *self._kind(members[0], names))
        before = self._channels.get(key)
        if before is None or before.stretch != stretch:
            made = self._workers.gradients_summed(
                stretch, "outer gradients", None if before is None else before.channel
            )
            self._channels[key] = MessageChannel(stretch, made)
        return self._channels[key].channel

    def _kind(self, parameter: nn.Parameter, names: Mapping[int, str]) -> tuple[torch.dtype, str]:
        """Return the dtype and the word of the part, which the tensors of a message share."""
        return self.dtype(parameter), self._parts[names[id(parameter)]].word

    def _stretch(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Stretch:
        """Describe a tensor in a message: a piece of a matrix is encoded as part of the matrix."""
        shape, outer_dim, first = self._inner.held_tensors.piece(parameter)
        whole = Stretch.of(prod(shape), dtype, [ParameterRow(name, shape, outer_dim, 0)])
        return whole.cut(first, first + parameter.numel())


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which outer gradients of a dtype are added up."""
    return torch.promote_types(dtype, torch.float32)
