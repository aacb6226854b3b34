"""Lets code run on a model that must leave no trace: looks, trials, plans, passes run besides.

A forward may write into buffers (running statistics, the vectors of spectral normalisation), fill
caches, set attributes and draw random numbers; a parametrized weight does so as soon as somebody
reads the attribute. So modules get copies of all these, and their own back.
"""

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from drivetrain.model.modules import compiles_inside
from drivetrain.model.valueless import ValuelessTensor
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
    What is compiled runs as it is written.
    """
    modules = list(model.modules())
    saved = [pair for module in modules for pair in _contents(module)]
    state = rng.Snapshot()
    try:
        _put_copies(modules)
        if seed is not None:
            rng.set_seed(seed)
        # Compiled modules run eagerly: a look is not worth a graph, and some have no values.
        compiled = any(map(compiles_inside, modules))
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        state.put_back()
        for owner, before in saved:
            _restore(owner, before)


Left: TypeAlias = dict[tuple[int, str], tuple[dict[str, Any], Any]]
"""Values by the dict that holds them and their name, each with this dict."""


class LeftBehind:
    """The buffers, and the numbers among attributes, that forwards of a model change.

    Passes that are run besides leave nothing of what was noted once: one forward counts once.

    Args:
        model: the model.
        inside: identities of modules that passes besides do not call.
    """

    def __init__(self, model: nn.Module, inside: Collection[int] = ()) -> None:
        self._modules = list(model.modules())
        self._outside = [module for module in self._modules if id(module) not in inside]
        self._places: dict[tuple[int, str], dict[str, Any]] = {}

    def state(self) -> Left:
        """Return copies of all buffers and numbers."""
        return {
            (id(owner), name): (owner, _value(value)) for owner, name, value in _held(self._modules)
        }

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context of a forward, which may change what it changes in every call."""
        before = self.state()
        yield
        after = self.state()
        for place, (owner, value) in after.items():
            if place not in before or not _is_equal(before[place][1], value):
                self._places[place] = owner

    @contextmanager
    def undone(self, *, everything: bool = False) -> Iterator[None]:
        """Context of a pass that leaves what was noted as it is, or everything outside."""
        known = [(owner, name, owner.get(name)) for (_, name), owner in self._places.items()]
        held = list(_held(self._outside)) if everything else known
        before = [(owner, name, value, _value(value)) for owner, name, value in held]
        try:
            yield
        finally:
            for owner, name, value, copied in before:
                if isinstance(value, Tensor):
                    with torch.no_grad():
                        value.copy_(copied)
                owner[name] = value


def is_left_equal(one: Left, other: Left) -> bool:
    """Whether forwards have left the same, to the bit."""
    return one.keys() == other.keys() and all(
        _is_equal(value, other[place][1]) for place, (_, value) in one.items()
    )


def _held(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the buffers and numbers of modules, each with the dict that holds it and its name."""
    for module in modules:
        buffers, own = module._buffers, vars(module)
        yield from (
            (buffers, name, buffer)
            for name, buffer in buffers.items()
            if not isinstance(buffer, ValuelessTensor)  # another stage has it
        )
        numbers = [(name, value) for name, value in own.items() if type(value) in (int, float)]
        yield from ((own, name, value) for name, value in numbers)


def _value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


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


# --- parameters without values, until the context ends ---


@dataclass(frozen=True, slots=True)
class Substitutes:
    """The tensors in the place of a model's own.

    Attributes:
        device: where the model's values are, or would be: the CPU for the meta device.
        parameters: in place of the distinct parameters, by their first name.
        aliases: all names of each, by its first name.
        buffers: copies of the buffers by name; some without values.
    """

    device: torch.device
    parameters: dict[str, ValuelessTensor]
    aliases: dict[str, tuple[str, ...]]
    buffers: dict[str, Tensor]

    def buffers_at(self, tensor: Tensor) -> set[str]:
        """Return the names of the buffers with values that a real tensor shares memory with."""
        memory = tensor.untyped_storage().data_ptr()
        valued = {n: b for n, b in self.buffers.items() if not isinstance(b, ValuelessTensor)}
        return {name for name, b in valued.items() if b.untyped_storage().data_ptr() == memory}


@contextmanager
def without_values(
    model: nn.Module,
    kind: type[ValuelessTensor] = ValuelessTensor,
    unknown: Collection[str] = (),
) -> Iterator[Substitutes]:
    """Context in which a model runs without values, of this kind; afterwards it is as before.

    Parameters lose their values, and so do the buffers named in ``unknown``, and those on the meta
    device; all else that a forward may change is a copy (``untouched``).
    """
    with untouched(model):
        keep_padding(model)
        yield _substitute(model, kind, unknown)


def keep_padding(model: nn.Module) -> None:
    """Let encoders of torch compute padded positions, too, in eval mode, as they do in training.

    Left to themselves they look at the values of the mask and the input and send ragged tensors
    through the blocks; at padded positions the output is then zero instead of some number.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _substitute(
    model: nn.Module, kind: type[ValuelessTensor], unknown: Collection[str]
) -> Substitutes:
    first = next(iter(model.parameters()), None)
    device = torch.device("cpu") if first is None else _real(first.device)
    by_identity: dict[int, str] = {}
    parameters: dict[str, ValuelessTensor] = {}
    aliases: dict[str, list[str]] = {}
    buffers: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            known = by_identity.setdefault(id(parameter), full)
            if known not in parameters:
                parameters[known] = kind.of(parameter, _real(parameter.device))
            module._parameters[name] = parameters[known]
            aliases.setdefault(known, []).append(full)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full = f"{prefix}.{name}" if prefix else name
                is_valued = not buffer.is_meta and full not in unknown
                found = buffer if is_valued else kind.of(buffer, _real(buffer.device))
                module._buffers[name] = buffers[full] = found
    names = {known: tuple(all_names) for known, all_names in aliases.items()}
    return Substitutes(device, parameters, names, buffers)


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device
