"""What a script finds under ``optimizer.state`` and ``optimizer.param_groups``: whole, as torch's.

A read gathers, so every rank must make it. What it returns is a copy that refuses changes; whole
state that is assigned reaches the ranks' shares.
"""

from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn

from drivetrain.errors import UsageError
from drivetrain.parts.guard import read_only

_CHANGED = UsageError(
    "expected optimizer.state to be read, found a change of what it returned, a copy of state that "
    "lies divided over the ranks; assign it, on every rank: state = {key: value.clone() for key, "
    "value in optimizer.state[p].items()}, change that, then optimizer.state[p] = state; {} resets "
    "the parameter"
)

_REGROUPED = UsageError(
    "expected the parameters of a group as they are, found a change of group['params'], whose "
    "parameters are divided over the ranks; use optimizer.add_param_group() for new ones, and "
    "requires_grad_(False) to freeze some"
)


class StateOfParameter(dict[str, Any]):
    """A copy of the whole state of one parameter."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _CHANGED

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class ParametersOfGroup(list[nn.Parameter]):
    """The script's own parameters of one group."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _REGROUPED

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = _refuse
    sort = reverse = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class GroupView(MutableMapping[str, Any]):
    """A group: options are those of the optimizer, parameters are the script's own.

    Args:
        group: of the optimizer.
        parameters: returns the script's own.
    """

    def __init__(
        self, group: dict[str, Any], parameters: Callable[[], Iterable[nn.Parameter]]
    ) -> None:
        self._group = group
        self._parameters = parameters

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            return ParametersOfGroup(self._parameters())
        return self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise _REGROUPED
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        if key == "params":
            raise _REGROUPED
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[str, Any]:
        """Return the group as a dict of its own."""
        return dict(self)


class HasStates(Protocol):
    """Where the whole state of parameters is read and replaced."""

    def walk(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        """Yield keys of ``optimizer.state`` with whole state. Collective."""

    def known(self) -> Sequence[Any]:
        """Return the keys that have state. Collective."""

    def read(self, key: Any) -> Mapping[str, Any]:
        """Return whole state. Collective."""

    def replace(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Replace the state of some keys. Collective."""

    def reset(self) -> None:
        """Let go of all state. Collective."""


class StateView(MutableMapping[Any, Mapping[str, Any]]):
    """The state of an optimizer whose parameters ranks divide, by the script's parameters.

    As in torch, a parameter without state has an empty one; to read it leaves nothing behind.

    Args:
        states: where state is read and replaced.
    """

    def __init__(self, states: HasStates) -> None:
        self._states = states

    def __getitem__(self, key: Any) -> Mapping[str, Any]:
        return shown(self._states.read(key))

    def __setitem__(self, key: Any, state: Mapping[str, Any]) -> None:
        self._states.replace({key: state})

    def __delitem__(self, key: Any) -> None:
        self._states.replace({key: {}})

    def __contains__(self, key: object) -> bool:
        return any(each is key for each in self._states.known())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states.known())

    def __len__(self) -> int:
        return len(self._states.known())

    def clear(self) -> None:
        """Let go of all state."""
        self._states.reset()

    def items(self) -> ItemsView[Any, Mapping[str, Any]]:
        """Return pairs of a parameter and its state; every rank gathers all of them in order."""
        return _Items(self)

    def values(self) -> ValuesView[Mapping[str, Any]]:
        """Return the state of each parameter; every rank gathers all of them in order."""
        return _Values(self)

    def walk(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        """Yield pairs of a parameter and its state."""
        return ((key, shown(state)) for key, state in self._states.walk())


class _Items(ItemsView[Any, Mapping[str, Any]]):
    _mapping: StateView

    def __iter__(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        return self._mapping.walk()


class _Values(ValuesView[Mapping[str, Any]]):
    _mapping: StateView

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (state for _, state in self._mapping.walk())


def shown(state: Mapping[str, Any]) -> StateOfParameter:
    """Return state whose tensors refuse writes."""
    return StateOfParameter(
        {
            key: read_only(value, _CHANGED) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
    )
