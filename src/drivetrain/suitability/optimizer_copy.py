"""A copy of an optimizer, for an experiment: it steps other tensors, and shares nothing but code.

Lists, dicts, tensors, generators and optimizers inside are copies, also behind closures and bound
methods: whatever the copy does, the script's object stays as it was. ``copy.deepcopy`` would lose
the attributes of optimizers, and copy the state of all parameters.
"""

import copy
import functools
import gc
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SIMPLE = (int, float, complex, str, bool, bytes, type(None), torch.dtype, torch.device, type)

_CALLED = (MethodType, FunctionType, functools.partial, BuiltinMethodType, MethodWrapperType)

_PROTOCOL = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__del__")
"""What a class defines that knows by itself how its objects are copied, or ends something."""

_LARGEST = 1 << 16
"""Elements of a tensor that is copied with its values: an optimizer of parts has no use for more,
and those of parameters, and their averages, may be large."""


class NotCopiedError(Exception):
    """An optimizer cannot be copied: a step of the copy would step the script's own."""


def copied(
    optimizer: Optimizer,
    groups: Sequence[Sequence[nn.Parameter]],
    others: Mapping[nn.Parameter, nn.Parameter],
) -> Any:
    """Return an optimizer with the same attributes and options, other parameters, and no state.

    Args:
        optimizer: of any class, perhaps around others.
        groups: the parameters of each of its groups.
        others: what it holds in the place of parameters outside of these groups, as in a list of
            its own; by default parameters without values and gradients.

    Raises:
        NotCopiedError: it holds another optimizer in an object that cannot be copied, or one that
            changes whenever somebody asks.
    """
    copies = _Copies()
    for parameter, other in others.items():
        copies.take(parameter, other)
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        rest = {key: value for key, value in group.items() if key != "params"}
        copies.take(group, {**copies.of(rest), "params": list(parameters)})
    return copies.of(optimizer)


class _Copies:
    """The copies of one optimizer's objects, each made once."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._alive: list[Any] = []  # an identity must not be given to another object meanwhile

    def take(self, value: Any, made: Any) -> Any:
        """Let ``made`` be the copy of an object."""
        self._alive.append(value)
        self._made[id(value)] = made
        return made

    def of(self, value: Any) -> Any:
        """Return the copy of an object; one that cannot be copied, such as a lock, itself."""
        if isinstance(value, _SIMPLE):
            return value
        if id(value) not in self._made:
            self.take(value, self._copied(value))
        return self._made[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _without_large_values(value)
        if isinstance(value, dict | list | deque):
            return self._filled(value)
        if isinstance(value, tuple | set | frozenset):
            items = list(map(self.of, value))
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, _CALLED):
            return self._function(value)
        if isinstance(value, Optimizer | nn.Module) or not _copies_itself(type(value)):
            return self._object(value)
        return self._by_its_class(value)

    def _filled(self, value: Any) -> Any:
        made = self.take(value, copy.copy(value))  # before its items, which may hold it
        made.clear()
        if isinstance(value, dict):
            made.update((self.of(key), self.of(each)) for key, each in value.items())
        else:
            made.extend(map(self.of, value))
        return made

    def _function(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, BuiltinMethodType | MethodWrapperType):  # such as append of a list
            return getattr(self.of(value.__self__), value.__name__) if _is_bound(value) else value
        if isinstance(value, functools.partial):
            args, keywords = map(self.of, value.args), self.of(value.keywords)
            return functools.partial(self.of(value.func), *args, **keywords)
        if not value.__closure__:
            return value
        closure = value.__closure__
        cells = tuple(CellType() for _ in closure)
        name, defaults = value.__name__, value.__defaults__
        made = FunctionType(value.__code__, value.__globals__, name, defaults, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        self.take(value, made)  # before its cells, which may hold it
        vars(made).update(vars(value))
        for cell, given in zip(cells, closure, strict=True):
            if given != CellType():  # a name without a value yet
                cell.cell_contents = self.of(given.cell_contents)
        return made

    def _object(self, value: Any) -> Any:
        try:
            made = object.__new__(type(value))
            attributes = vars(value)
        except TypeError:  # made in another language, or without attributes
            return self._by_its_class(value)
        self.take(value, made)
        if isinstance(value, Optimizer):
            attributes = dict(self._attributes(value))
        vars(made).update((name, self.of(each)) for name, each in attributes.items())
        return made

    def _attributes(self, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        """Yield what an optimizer has without its state, its hooks, and what replaced methods."""
        for name, value in vars(optimizer).items():
            if name == "state" and id(value) not in self._made:
                self.take(value, defaultdict(dict))
            elif name.endswith("_hooks"):
                self.take(value, OrderedDict())
            if not callable(getattr(type(optimizer), name, None)):  # as a scheduler puts there
                yield name, value

    def _by_its_class(self, value: Any) -> Any:
        if isinstance(value, GeneratorType):
            raise NotCopiedError("a generator cannot be copied")
        inside = [value()] if isinstance(value, weakref.ref) else gc.get_referents(value)
        inside += list(vars(value).values()) if hasattr(value, "__dict__") else []
        if any(isinstance(each, Optimizer) for each in inside):
            raise NotCopiedError(f"an object of class {type(value).__name__} cannot be copied")
        if hasattr(type(value), "__del__"):
            return value
        try:
            return copy.deepcopy(value, self._made)
        except Exception:  # anything: of a lock, a file, a group of processes
            return value


def _is_bound(value: Any) -> bool:
    """Whether a function of another language belongs to an object, and not to a module."""
    return value.__self__ is not None and not isinstance(value.__self__, ModuleType | type)


def _copies_itself(kind: type) -> bool:
    return any(getattr(kind, n, None) is not getattr(object, n, None) for n in _PROTOCOL)


def _without_large_values(value: Tensor) -> Tensor:
    """Return a copy; parameters, of which groups get others, and large tensors lie on meta."""
    if isinstance(value, nn.Parameter) or value.numel() > _LARGEST:
        made = torch.empty(value.shape, dtype=value.dtype, device="meta")
        is_parameter = isinstance(value, nn.Parameter)
        return nn.Parameter(made, value.requires_grad) if is_parameter else made
    return value.detach().clone().requires_grad_(value.requires_grad)
