"""Replaces the parameters and buffers of other stages by proxies."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drivetrain_megatron.pipeline.cut import StageCut
from drivetrain_megatron.recording.phases import Recording, Use
from drivetrain_megatron.recording.proxy import StageProxy, proxy_of

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
    """Where a proxy stands or will stand.

    Attributes:
        module: that has the parameter or buffer.
        name: in the module.
        proxy: its facts.
    """

    module: nn.Module
    name: str
    proxy: StageProxy


def is_local(use: Use, phases: Collection[int]) -> bool:
    """Whether a parameter or buffer is used in phases; without any use, in the first."""
    return not (use.phases or {0}).isdisjoint(phases)


def foreign_places(
    model: nn.Module, recording: Recording, phases: Collection[int], device: torch.device
) -> list[ProxyPlace]:
    """Return where proxies must stand for phases to run; nothing is changed.

    A buffer from which something follows without a parameter stays on every stage.

    Args:
        model: the whole model.
        recording: of the model.
        phases: that will run.
        device: that proxies name as theirs.
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
    return ProxyPlace(module, name, proxy_of(getattr(module, name), device))


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
