"""The messages between workers about the tensors that one optimizer steps."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.collectives import Communicator
from drivetrain.collectives.channels import SumChannel
from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain.parts.naming import named_parameters
from drivetrain.shards import HeldPart
from drivetrain.strategy import Strategy


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
        self._channels: dict[tuple[int, Stretch], SumChannel] = {}

    def names(self) -> Mapping[int, str]:
        """Return the name of every tensor that optimizers hold, by identity."""
        own = {id(p): name for name, p in named_parameters(self._model).items()}
        return {**own, **self._inner.names()}

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of a tensor's values, on all workers the same."""
        return self._inner.held_tensors.dtype(parameter)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the tensors that the optimizer steps now."""
        for group in self._optimizer.param_groups:
            yield from (each for each in group["params"] if each.requires_grad)

    def stepped_parts(self) -> Iterator[tuple[str, str]]:
        """Yield (name, word of the part) of each part that the optimizer steps, whole or a range.

        The range is of the flattened part: checkpoints have the kept errors of such ranges.
        """
        names = self.names()
        for parameter in self.parameters():
            part = self._parts[name := names[id(parameter)]]
            piece = self._inner.held_tensors.piece(parameter)
            shape = piece.shape if piece and piece.contiguous else tuple(parameter.shape)
            if shape == part.shape:
                yield name, part.word

    def of(self, fragment: int | None = None) -> Sequence[Sequence[nn.Parameter]]:
        """Return the tensors of each message: of one fragment, or of all.

        A message has tensors of one dtype, from parts that the same ranks of the worker have: so
        these ranks get the same bits, whatever else each of them has.
        """
        names = self.names()
        found: dict[tuple[torch.dtype, str], list[nn.Parameter]] = {}
        for parameter in self.parameters():
            name = names[id(parameter)]
            if fragment in (None, self._fragments[name]):
                kind = self.dtype(parameter), self._parts[name].word
                found.setdefault(kind, []).append(parameter)
        return list(found.values())

    def channel(self, fragment: int, members: Sequence[nn.Parameter]) -> SumChannel:
        """Return the channel of a message's sums; errors of a method are kept in the channel."""
        names, dtype = self.names(), wide(self.dtype(members[0]))
        pieces = [self._stretch(names[id(parameter)], parameter, dtype) for parameter in members]
        stretch = Stretch.joined(pieces, dtype)
        key = (fragment, stretch)
        if key not in self._channels:
            self._channels[key] = self._workers.gradients_summed(stretch, "outer gradients")
        return self._channels[key]

    def _stretch(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Stretch:
        """Describe a tensor in a message: a piece of a matrix is encoded as part of the matrix."""
        piece = self._inner.held_tensors.piece(parameter)
        shape, outer_dim, first, _ = piece or (tuple(parameter.shape), 0, 0, True)
        whole = Stretch.of(prod(shape), dtype, [ParameterRow(name, shape, outer_dim, 0)])
        return whole.cut(first, first + parameter.numel())


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which outer gradients of a dtype are added up."""
    return torch.promote_types(dtype, torch.float32)
