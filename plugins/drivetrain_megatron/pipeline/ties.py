"""Parameters that several stages use: one stage owns each, the others hold copies of its values.

The owner is the first stage that uses it. It optimizes the parameter and saves it; a copy is no
parameter of the strategy inside of the cell. After the last backward of a step a copy's gradient
goes to the owner, where it enters the owner's last backward; before the next forward the owner's
new values go to the copies. So nothing is counted twice, and copies cannot drift apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.building import WeightSource, become
from drivetrain.strategy import Strategy
from drivetrain_megatron.pipeline.other_stages import Tie
from drivetrain_megatron.pipeline.transfer import Direction, Link, Message, Meta


class SharedParameters:
    """The parameters that stages of this rank share with stages of other ranks.

    Args:
        model: the model, split.
        tied: the parameters that several stages use, of all stages.
        owned: indices of this rank's stages.
        ranks: how many ranks the pipeline has.
        link: this rank's end of the pipeline.
    """

    def __init__(
        self, model: nn.Module, tied: Iterable[Tie], owned: Sequence[int], ranks: int, link: Link
    ) -> None:
        self._link = link
        self._lent: list[tuple[int, Tie, nn.Parameter, list[int]]] = []
        self._copies: list[tuple[int, Tie, Tensor, int]] = []
        mine = set(owned)
        names = dict(model.named_parameters(remove_duplicate=False))
        rank = owned[0] % ranks
        for number, tie in enumerate(tied):
            elsewhere = sorted({stage % ranks: stage for stage in reversed(tie.copies)}.values())
            elsewhere = [stage for stage in elsewhere if stage % ranks != tie.owner % ranks]
            if tie.owner % ranks == rank:
                if elsewhere and tie.owner in mine:
                    self._lent.append((number, tie, names[tie.name], elsewhere))
            elif copy := next((stage for stage in elsewhere if stage % ranks == rank), None):
                self._copies.append((number, tie, _take_out(model, names[tie.name]), copy))

    @property
    def taken(self) -> frozenset[int]:
        """Identities of the parameters that are copies."""
        return frozenset(id(copy) for _, _, copy, _ in self._copies)

    def materialize(self, source: WeightSource, device: torch.device) -> None:
        """Give copies their values, where the model was built without any."""
        for _, tie, copy, _ in self._copies:
            if copy.is_meta:
                become(copy, source.value(tie.name, copy).to(device), tie.name)

    def send_gradients(self) -> None:
        """Send the gradients of copies to their owners; zeros where a copy got none."""
        for number, tie, copy, stage in self._copies:
            if copy.requires_grad:
                gradient = torch.zeros_like(copy) if copy.grad is None else copy.grad
                copy.grad = None
                self._link.send(Message(Direction.TIED, stage, tie.owner, number), [gradient])

    def receive_gradients(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return the parameters that are lent, and the sum of their copies' gradients."""
        parameters, gradients = [], []
        for number, tie, parameter, stages in self._lent:
            if not parameter.requires_grad:
                continue
            meta = [Meta(tuple(parameter.shape), parameter.dtype)]
            arrivals = [
                self._link.receive(Message(Direction.TIED, stage, tie.owner, number), meta)
                for stage in stages
            ]
            total = arrivals[0].wait()[0]
            for arrival in arrivals[1:]:
                total.add_(arrival.wait()[0])
            parameters.append(parameter)
            gradients.append(total)
        return parameters, gradients

    def refresh(self, inner: Strategy[Any]) -> None:
        """Give copies their owners' values.

        Args:
            inner: the data-parallel strategy of the cell, which gathers divided parameters.
        """
        with inner.gathered([parameter for _, _, parameter, _ in self._lent], modify=False):
            for number, tie, parameter, stages in self._lent:
                for stage in stages:
                    message = Message(Direction.TIED, tie.owner, stage, number)
                    self._link.send(message, [parameter.detach().clone()])
        for number, tie, copy, stage in self._copies:
            message = Message(Direction.TIED, tie.owner, stage, number)
            arrival = self._link.receive(message, [Meta(tuple(copy.shape), copy.dtype)])
            with torch.no_grad():
                copy.copy_(arrival.wait()[0])
        self._link.flush()


def _take_out(model: nn.Module, parameter: nn.Parameter) -> Tensor:
    """Make a parameter an ordinary attribute: forward finds it, ``parameters()`` does not."""
    for module in model.modules():
        names: Mapping[str, nn.Parameter | None] = dict(module._parameters)
        for name, found in names.items():
            if found is parameter:
                del module._parameters[name]
                module.__dict__[name] = parameter
    return parameter
