"""Parameters of other stages: proxies in their places, copies where several stages use one.

The first stage that uses a parameter is the owner, which optimizes and saves the parameter. A copy
on another rank is no parameter of the strategy inside of the cell. After the last backward of a
step a copy's gradient goes to the owner, where it enters the owner's last backward; before the next
forward the owner's new values go to the copies. So nothing is counted twice, and copies cannot
drift apart.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from drivetrain.building import WeightSource, become
from drivetrain.errors import UsageError
from drivetrain.strategy import Strategy
from drivetrain_megatron.marks import absent_like, is_absent
from drivetrain_megatron.pipeline.cut import StageCut
from drivetrain_megatron.pipeline.stand_ins import ParameterProxy, SharedCopy
from drivetrain_megatron.pipeline.transfer import Direction, Link, Message, Meta
from drivetrain_megatron.recording.phases import Recording, Use
from drivetrain_megatron.recording.proxy import StageProxy

P = ParamSpec("P")
R = TypeVar("R")
HasStagesT = TypeVar("HasStagesT")

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages use.

    Attributes:
        name: its first name in the model.
        owner: the first stage that uses it, where its gradient is summed and it is optimized.
        copies: the other stages that use it, in order.
    """

    name: str
    owner: int
    copies: tuple[int, ...]


def ties(recording: Recording, cut: StageCut) -> tuple[Tie, ...]:
    """Return the parameters that are used on several stages of a cut."""
    found = []
    for name, use in recording.parameters.items():
        stages = sorted({cut.stage_of(phase) for phase in use.phases})
        if len(stages) > 1:
            found.append(Tie(name, stages[0], tuple(stages[1:])))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ProxyPlace:
    """The module and name where a proxy stands, or will stand, for a parameter or buffer.

    In trials the place of a proxy is taken by a tensor with other values.
    """

    module: nn.Module
    name: str
    proxy: Tensor


def is_local(use: Use, phases: Collection[int]) -> bool:
    """Whether a parameter or buffer is used in phases; without any use, in the first."""
    return not (use.phases or {0}).isdisjoint(phases)


def foreign_places(
    model: nn.Module, recording: Recording, phases: Collection[int], device: torch.device
) -> list[ProxyPlace]:
    """Return where proxies must stand for some phases to run; nothing is changed.

    A buffer from which something follows without a parameter stays on every stage.
    """
    names = [
        name
        for use in recording.parameters.values()
        if not is_local(use, phases)
        for name in use.names
    ]
    names += [
        name
        for name, use in recording.buffers.items()
        if use.phases and not use.ambient and not is_local(use, phases)
    ]
    return [place_of(model, name, device) for name in names]


def place_of(model: nn.Module, full_name: str, device: torch.device) -> ProxyPlace:
    """Return where a proxy can stand for a parameter or buffer."""
    prefix, _, name = full_name.rpartition(".")
    module = model.get_submodule(prefix)
    value = getattr(module, name)
    kind = ParameterProxy if isinstance(value, nn.Parameter | ParameterProxy) else StageProxy
    return ProxyPlace(module, name, kind.of(value, device))


def take_away(places: Iterable[ProxyPlace]) -> None:
    """Remove parameters and buffers from their modules; proxies stand in ``__dict__``."""
    for module, name, proxy in ((place.module, place.name, place.proxy) for place in places):
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        module.__dict__[name] = proxy


@contextmanager
def hidden(places: Iterable[ProxyPlace]) -> Iterator[None]:
    """Let proxies stand before parameters and buffers that stay; found first by attribute."""
    chosen = list(places)
    before = [place.module.__dict__.get(place.name) for place in chosen]
    for place in chosen:
        place.module.__dict__[place.name] = place.proxy
    try:
        yield
    finally:
        for place, value in zip(chosen, before, strict=True):
            if value is None:
                place.module.__dict__.pop(place.name, None)
            else:  # a copy of a parameter that another rank owns
                place.module.__dict__[place.name] = value


def take_hooks(block: nn.Module) -> None:
    """Let no hook and no compiled code run when a block of another stage is called."""
    own: Mapping[str, Any] = block.__dict__
    for name in _HOOKS:
        if name in own:
            block.__dict__[name] = OrderedDict()
    block.__dict__["_compiled_call_impl"] = None


_GLIMPSE = 256
"""Elements of a parameter that are compared to see whether a script has changed it."""


class SharedParameters:
    """The parameters that stages of this rank share with stages of other ranks."""

    def __init__(
        self, model: nn.Module, tied: Iterable[Tie], owned: Sequence[int], ranks: int, link: Link
    ) -> None:
        self._link = link
        self._lent: list[tuple[int, Tie, nn.Parameter, list[int]]] = []
        self._copies: list[tuple[int, Tie, Tensor, int]] = []
        self._glimpses: dict[int, Tensor] = {}
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

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which copies have their values and gradients; nobody else gets at them."""
        copies: list[Any] = [copy for _, _, copy, _ in self._copies if type(copy) is SharedCopy]
        for copy in copies:
            copy.__class__ = nn.Parameter
        try:
            yield
        finally:
            for copy in copies:
                copy.__class__ = SharedCopy

    def hide(self, has_gradient: Callable[[], bool], device: torch.device) -> None:
        """Let copies be seen in ``computing`` alone from now on."""
        for _, _, copy, _ in self._copies:
            proxy = ParameterProxy.of(copy, device)
            proxy.has_gradient = has_gradient
            hidden: Any = copy
            hidden.__class__, hidden._proxy = SharedCopy, proxy

    def materialize(self, source: WeightSource, device: torch.device) -> None:
        """Give copies their values, where the model was built without any."""
        for _, tie, copy, _ in self._copies:
            if copy.is_meta:
                become(copy, source.value(tie.name, copy).to(device), tie.name)

    def send_gradients(self) -> None:
        """Send the gradients of copies to their owners, also that a copy has none."""
        for number, tie, copy, stage in self._copies:
            if copy.requires_grad:
                gradient = absent_like(copy) if copy.grad is None else copy.grad
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
            arrived = [arrival.wait()[0] for arrival in arrivals]
            made = [gradient for gradient in arrived if not is_absent(gradient)]
            if made:
                for gradient in made[1:]:
                    made[0].add_(gradient)
                parameters.append(parameter)
                gradients.append(made[0])
        return parameters, gradients

    def refresh(self, inner: Strategy[Any]) -> None:
        """Give copies their owners' values, gathered by the data-parallel strategy."""
        with inner.gathered([parameter for _, _, parameter, _ in self._lent], modify=False):
            for number, tie, parameter, stages in self._lent:
                self._glimpses[number] = _glimpse(parameter)
                for stage in stages:
                    message = Message(Direction.TIED, tie.owner, stage, number)
                    self._link.send(message, [parameter.detach().clone()])
        for number, tie, copy, stage in self._copies:
            message = Message(Direction.TIED, tie.owner, stage, number)
            arrival = self._link.receive(message, [Meta(tuple(copy.shape), copy.dtype)])
            with torch.no_grad():
                (values,) = arrival.wait()
                if not torch.equal(copy, values):  # a forward may wait that needs it as it was
                    copy.copy_(values)
        self._link.flush()

    def check_unchanged(self) -> None:
        """Check that parameters that are lent have the values that their copies have.

        Raises:
            UsageError: names one that the script has changed.
        """
        for number, tie, parameter, _ in self._lent:
            before = self._glimpses.get(number)
            if before is not None and not torch.equal(_glimpse(parameter), before):
                raise UsageError(
                    f"expected {tie.name!r}, of which other pipeline stages have copies, to be as "
                    "in the forward before, found other values: change it inside of 'with "
                    "accelerator.gathered(model.parameters()):', so that the copies follow"
                )


def with_copies(
    method: Callable[Concatenate[HasStagesT, P], R],
) -> Callable[Concatenate[HasStagesT, P], R]:
    """Let a method of a pipeline, which has ``stages``, compute with copies."""

    @functools.wraps(method)
    def inside(pipeline: HasStagesT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        stages: Any = pipeline
        with stages.stages.shared.computing():
            return method(pipeline, *args, **kwargs)

    return inside


def _glimpse(parameter: Tensor) -> Tensor:
    """Return some elements of a parameter, from all over it."""
    flat = parameter.detach().flatten()
    return flat[:: max(flat.numel() // _GLIMPSE, 1)].clone()


def _take_out(model: nn.Module, parameter: nn.Parameter) -> Tensor:
    """Put a copy in its memory into ordinary attributes: forward finds it, no list has it."""
    copied = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for module in model.modules():
        names: Mapping[str, nn.Parameter | None] = dict(module._parameters)
        for name, found in names.items():
            if found is parameter:
                del module._parameters[name]
                module.__dict__[name] = copied
    return copied
