"""Lets code run on a model that must leave no trace: looks, trials, plans.

A forward may write into buffers (running statistics, the vectors of spectral normalisation), fill
caches, set attributes and draw random numbers; a parametrized weight does so as soon as somebody
reads the attribute. So modules get copies of all these, and their own back.
"""

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.runtime import rng

PLANNING = 20210615
"""Seed of what is drawn while a model is planned: any would do, the same on all ranks."""

_OWN = frozenset(vars(nn.Module()))
"""Attributes in which every module keeps its tensors, children and hooks."""

_LISTS = (list, deque)


@contextmanager
def untouched(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Context in which a model may run; afterwards the model and all generators are as before.

    Inside, buffers, tensors and generators that modules hold are copies, also those in lists, dicts
    and sets; parameters and other objects are the model's own. A seed decides all that is drawn.
    """
    modules = list(model.modules())
    saved = [pair for module in modules for pair in _contents(module)]
    state = rng.capture()
    try:
        _put_copies(modules)
        if seed is not None:
            rng.set_seed(seed)
        yield
    finally:
        rng.restore(state)
        for owner, before in saved:
            _restore(owner, before)


def _contents(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the dicts of a module, such as attributes, buffers and hooks, with their contents."""
    inside = [value for value in vars(module).values() if isinstance(value, dict)]
    return [(owner, dict(owner)) for owner in (vars(module), *inside)]


def _restore(owner: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Give a dict its contents back, past methods of its class that refuse changes."""
    if [*owner] == [*before] and all(owner[key] is value for key, value in before.items()):
        return
    kind = OrderedDict if isinstance(owner, OrderedDict) else dict
    kind.clear(owner)
    for key, value in before.items():
        kind.__setitem__(owner, key, value)


def _put_copies(modules: Sequence[nn.Module]) -> None:
    """Give modules copies of everything that a forward may change; shared objects stay shared."""
    known: dict[int, Any] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            module._buffers[name] = _copied(buffer, known)
        for name, value in list(vars(module).items()):
            if name not in _OWN:
                vars(module)[name] = _copied(value, known)


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Return a copy of a value; an object of a kind that no forward changes comes back itself."""
    if id(value) in known:
        return known[id(value)]
    kind = type(value)
    made = value
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and not value.is_meta:
            made = value.detach().clone().requires_grad_(value.requires_grad)
    elif kind in _LISTS or kind is dict:
        made = known[id(value)] = copy.copy(value)  # before its items: they may hold it
        for key in value if kind is dict else range(len(value)):
            made[key] = _copied(value[key], known)
    elif kind is set or isinstance(value, torch.Generator | random.Random):
        made = copy.copy(value) if kind is set else copy.deepcopy(value)
    elif kind.__module__.startswith("numpy.random"):
        made = copy.deepcopy(value)
    known[id(value)] = made
    return made
