"""The state of optimizers and models as one process has it, where ranks divide it.

What a script finds under ``optimizer.state`` and ``optimizer.param_groups`` is whole, as torch's. A
read gathers, so every rank must make it. What it returns is a copy that refuses changes; whole
state that is assigned reaches the ranks' shares.

Copies of a model's whole state, for exports and for the model's own ``save_pretrained``.

The ``save_pretrained`` of transformers, diffusers and peft asks the model for its ``state_dict``,
where a strategy may have a rank's part alone, or nothing. A prepared model gives it whole tensors.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.checkpoint.commit import check_same, together
from drivetrain.checkpoint.encoding import copy_overlap
from drivetrain.checkpoint.manifest import numel
from drivetrain.collectives.facts import (
    device_of,
    differing,
    group_of,
    meet_everyone,
    named,
    size_of,
)
from drivetrain.communication import gather_object
from drivetrain.errors import RankMismatchError, UsageError
from drivetrain.model.guard import Elsewhere, read_only
from drivetrain.model.modules import UninheritedMethod, clean_name
from drivetrain.nested import describe
from drivetrain.parallel.replicated import MOST_BYTES, batched
from drivetrain.runtime.parts import Part
from drivetrain.saved_state import TrainingState
from drivetrain.strategy import Strategy

# --- the groups as the script made them, before a strategy divides the parameters ---

KERNELS = frozenset({"foreach", "fused"})
"""Options that choose a kernel: no saved state overrules the choice of the loading run."""


class GivenParameter:
    """A parameter of the script, which a rank of a pipeline lets go of if it is another stage's.

    Args:
        parameter: whole.

    Attributes:
        key: its identity.
        nbytes: size of the whole parameter.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.key = id(parameter)
        self.nbytes = parameter.nbytes
        self._reference = ref(parameter)
        self._facts = parameter.shape, parameter.dtype, parameter.requires_grad

    def is_same(self, tensor: Tensor) -> bool:
        """Whether a tensor is the script's own object, or the one in its place."""
        return tensor is self._reference() or tensor is self.__dict__.get("stand_in")

    @property
    def parameter(self) -> nn.Parameter:
        """The script's own object."""
        found = self._reference()
        return self.stand_in if found is None else found

    @cached_property
    def stand_in(self) -> nn.Parameter:
        """A parameter of the same shape without values, for ranks that have none."""
        shape, dtype, trainable = self._facts
        values = torch.empty(shape, dtype=dtype, device="meta")
        return nn.Parameter(values, requires_grad=trainable)


@dataclass(frozen=True, slots=True)
class GivenGroup:
    """One group.

    Attributes:
        parameters: in the script's order.
        kernels: the script's options that choose a kernel.
    """

    parameters: Sequence[GivenParameter]
    kernels: Mapping[str, Any]

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "GivenGroup":
        """Describe a group whose parameters are whole."""
        kernels = {key: group[key] for key in KERNELS & group.keys()}
        return cls([GivenParameter(each) for each in group["params"]], kernels)


class GivenGroups:
    """All groups of one optimizer, with those that are added later.

    Args:
        optimizer: no strategy has divided its parameters yet.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._known: list[GivenGroup] = []
        self.of(optimizer)

    def of(self, optimizer: Optimizer) -> list[GivenGroup]:
        """Return the groups of the optimizer: of new ones, parameters are whole until a step."""
        new = optimizer.param_groups[len(self._known) :]
        self._known += [GivenGroup.of(group) for group in new]
        return self._known


# --- what a script finds under ``optimizer.state`` and ``optimizer.param_groups`` ---

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


@dataclass(eq=False, repr=False)
class GroupView(MutableMapping[str, Any]):
    """A group: options are those of the optimizer, parameters are the script's own.

    Attributes:
        group: of the optimizer.
        parameters: returns the script's own.
    """

    group: dict[str, Any]
    parameters: Callable[[], Iterable[nn.Parameter]]

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            return ParametersOfGroup(self.parameters())
        return self.group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise _REGROUPED
        self.group[key] = value

    def __delitem__(self, key: str) -> None:
        if key == "params":
            raise _REGROUPED
        del self.group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.group)

    def __len__(self) -> int:
        return len(self.group)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[str, Any]:
        """Return the group as a dict of its own."""
        return dict(self)


class StateView(MutableMapping[Any, Mapping[str, Any]]):
    """The state of an optimizer whose parameters ranks divide, by the script's parameters.

    As in torch, a parameter without state has an empty one; to read it leaves nothing behind.

    Args:
        states: where state is read and replaced.
    """

    def __init__(self, states: "WholeOptimizer") -> None:
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


# --- whole state from the shares of all ranks, and shares from whole state ---

_ALIGNED = 16
"""Tensors begin at multiples of so many bytes in the memory where they are put together."""

State = Mapping[str, Any]
"""An optimizer's state for one parameter, by key."""


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """A prepared model that has parameters of an optimizer.

    Attributes:
        strategy: of the model.
        index: of the optimizer among those of the model.
        names: of the model's parameters, by identity.
        known: identities of those that this rank's model has.
    """

    strategy: Strategy[Any]
    index: int
    names: dict[int, str]
    known: Collection[int]


class StateFacts(NamedTuple):
    """A state tensor as one rank knows it.

    Attributes:
        shape: of the whole.
        dtype: of its elements.
        device: kind of memory in which shares lie.
        elements: how many of them this rank has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    elements: int

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


Told = dict[str, dict[str, Any]]
"""By the name of a parameter and key of its state: facts of a tensor, or a plain value."""


class StateExchange:
    """Exchanges the state of one optimizer's parameters in one model. Collective.

    Args:
        optimizer: of the strategy.
        holder: the model.
    """

    def __init__(self, optimizer: Optimizer, holder: Holder) -> None:
        self._holder = holder
        self._group = holder.strategy.pace.states
        self._tensors = holder.strategy.state
        self._world = holder.strategy.run.world
        held = {**holder.names, **self._tensors.names()}
        self._plain: Told = {}
        for parameter, state in optimizer.state.items():
            plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            if plain and id(parameter) in held:
                self._plain[held[id(parameter)]] = plain

    def known(self, names: Sequence[str], operation: str) -> set[str]:
        """Return the parameters of which some rank has state."""
        self._meet(operation)
        mine = {shard.name for shard in self._tensors.states(self._holder.index, names)}
        mine |= self._plain.keys() & set(names)
        return set(gather_object(sorted(mine), group=self._group))

    @torch.no_grad()
    def whole(self, names: Sequence[str], operation: str) -> dict[str, dict[str, Any]]:
        """Return the whole state of some parameters, in memory of its own; none before a step.

        Args:
            names: of the parameters.
            operation: in words, for ranks that do not come.

        Raises:
            CollectiveError: a rank does not come.
            RankMismatchError: the shares are not the whole.
        """
        self._meet(operation)
        shards = list(self._tensors.states(self._holder.index, names))
        mine: Told = {name: dict(self._plain.get(name, {})) for name in names}
        for shard in shards:
            key = _key(shard.state)
            before = mine[shard.name].get(key)
            count = numel(shard.part) + (before.elements if before is not None else 0)
            facts = StateFacts(shard.shape, shard.tensor.dtype, shard.tensor.device.type, count)
            mine[shard.name][key] = facts
        everyone: list[Told] = gather_object(mine, group=self._group)
        told = {name: _joined(name, [each[name] for each in everyone]) for name in names}
        memory, found = self._room(told)
        for shard in shards:
            place = found[shard.name][_key(shard.state)].view(-1)
            values = shard.tensor.detach().reshape(-1)
            copy_overlap(place, Part.whole(shard.shape), values, shard.part)
        if size_of(self._group) > 1 and memory.numel():
            ranks = group_of(self._group)
            with named(operation, ranks):  # as bytes, zeros elsewhere: no value changes
                dist.all_reduce(memory, group=ranks)
        return found

    def replace(self, states: Mapping[str, State], operation: str) -> None:
        """Replace the state of some parameters by whole state; an empty one resets them.

        Raises:
            CheckpointError: ranks have other state, or state does not fit; on every rank.
        """
        text = describe(states, lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}")
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        same = {"the state": f"state of {len(states)} parameters with keys and shapes {digest}"}
        check_same(self._world, operation, same, self._group)
        holder, reader = self._holder, WholeStates(self._holder.index, states)
        load = partial(self._tensors.load_states, holder.index, reader, states.keys())
        together(self._world, operation, load, self._group)

    def _meet(self, operation: str) -> None:
        meet_everyone(operation, self._group)

    def _room(self, told: Told) -> tuple[Tensor, Told]:
        """Return zeros, and the state with a place among them for each tensor."""
        everything = [each for state in told.values() for each in state.values()]
        facts = [each for each in everything if isinstance(each, StateFacts)]
        device = torch.device(facts[0].device if facts else "cpu")
        if size_of(self._group) > 1:
            device = device_of(self._group, device) or device
        memory = torch.zeros(sum(map(_room_of, facts)), dtype=torch.uint8, device=device)
        start = 0
        found: Told = {}
        for name, state in told.items():
            found[name] = dict(state)
            for key, each in state.items():
                if isinstance(each, StateFacts):
                    place = memory[start : start + each.nbytes]
                    found[name][key] = place.view(each.dtype).view(each.shape)
                    start += _room_of(each)
        return memory, found


class WholeStates:
    """Whole state in memory as a checkpoint: implements ``drivetrain.shards.Reader``.

    Args:
        index: of the optimizer.
        states: by the names of parameters.

    Attributes:
        partial: True: weights and buffers keep their values.
    """

    def __init__(self, index: int, states: Mapping[str, State]) -> None:
        self.partial = True
        self._states = states
        self._tensors = {
            (name, f"{index}.{key}"): value.detach()
            for name, state in states.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def keys(self) -> Iterable[tuple[str, str]]:
        """Return the (name, state) pairs of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return tuple(self._tensors[name, state].shape)

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return a part of a tensor on the CPU, in memory of its own."""
        whole = self._tensors[name, state]
        wanted = part or Part.whole(whole.shape)
        memory = torch.empty(numel(wanted), dtype=whole.dtype, device="cpu")
        copy_overlap(memory, wanted, whole.reshape(-1), Part.whole(whole.shape))
        return memory.view(wanted.sizes) if wanted.flat is None else memory

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        """Return the state of a parameter that is no tensor."""
        state = self._states.get(name, {})
        return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


def _key(state: str) -> str:
    return state.partition(".")[2]


def _room_of(facts: StateFacts) -> int:
    return -(-facts.nbytes // _ALIGNED) * _ALIGNED


def _joined(name: str, everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of one parameter from what ranks have of it.

    Raises:
        RankMismatchError: the ranks have more or less elements than there are.
    """
    told: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for state in everyone:
        for key, each in state.items():
            told.setdefault(key, each)
            counts[key] += each.elements if isinstance(each, StateFacts) else 0
    for key, each in told.items():
        if isinstance(each, StateFacts) and counts[key] != prod(each.shape):
            raise RankMismatchError(
                f"expected {prod(each.shape)} elements of state {key!r} of {name!r} on all ranks "
                f"together, found {counts[key]}; ranks have stepped differently: load a checkpoint"
            )
    return told


# --- the optimizer ---

_TOGETHER = "(every rank must do so; accelerator.save_state() on all ranks saves the state)"
"""The way out, in the words of a rank that waits."""


@dataclass(frozen=True, slots=True, eq=False)
class StatedParameter:
    """A parameter of the optimizer, in the model that has it."""

    given: GivenParameter
    holder: Holder

    @property
    def name(self) -> str:
        """The parameter's name in its model."""
        return self.holder.names[self.given.key]

    @property
    def parameter(self) -> nn.Parameter:
        """The script's own, or where this rank's model lacks it, one without values."""
        if self.given.key in self.holder.known:
            return self.given.parameter
        self.holder.names.setdefault(id(self.given.stand_in), self.name)
        return self.given.stand_in


class WholeOptimizer:
    """The whole state of an optimizer whose parameters ranks divide. Every method is collective.

    Args:
        optimizer: of the strategies.
        given: its groups as the script made them.
        holders: the models that have its parameters.
    """

    def __init__(self, optimizer: Optimizer, given: GivenGroups, holders: Sequence[Holder]) -> None:
        self._optimizer = optimizer
        self._given = given
        self._groups = given.of(optimizer)
        self._holders = holders

    @property
    def param_groups(self) -> list[GroupView]:
        """The groups, with the script's own parameters."""
        pairs = zip(self._optimizer.param_groups, self._groups, strict=True)
        return [GroupView(group, partial(self._parameters, given)) for group, given in pairs]

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group; the next step lets strategies divide its parameters."""
        given = [group["params"]] if isinstance(group["params"], Tensor) else [*group["params"]]
        tensors = [each[1] if isinstance(each, tuple) else each for each in given]
        if any(known.is_same(each) for known in self._all for each in tensors):
            raise UsageError(
                "expected parameters that no group of the optimizer has, found some that one has; "
                "leave them out of add_param_group()"
            )
        names = {key: name for holder in self._holders for key, name in holder.names.items()}
        added = ", ".join(names.get(id(each), "one of no prepared model") for each in tensors)
        everyone = differing((added,), doing=f"optimizer.add_param_group() {_TOGETHER}")
        if everyone:
            told = "; ".join(
                f"rank {rank}: {each or 'none'}" for rank, (each,) in enumerate(everyone)
            )
            raise UsageError(
                f"expected the same parameters in a new group on all ranks, found {told}"
            )
        self._optimizer.add_param_group(group | {"params": given})
        self._given.of(self._optimizer)
        held = self._optimizer.param_groups[-1]
        held["params"] = [each for each in held["params"] if not isinstance(each, Elsewhere)]

    @property
    def state(self) -> StateView:
        """The state by the script's own parameters."""
        return StateView(self)

    # --- for the view of the state ---

    def walk(self) -> Iterator[tuple[Any, State]]:
        """Yield keys with whole state, a parameter at a time."""
        operation = f"optimizer.state of all parameters {_TOGETHER}"
        for member, state in self._walk(operation, nbytes=0):
            yield member.parameter, state
        yield from self._others().items()

    def known(self) -> Sequence[Any]:
        """Return the keys that have state."""
        found: list[Any] = []
        for holder, members in self._by_holder():
            names = [member.name for member in members]
            operation = f"the keys of optimizer.state {_TOGETHER}"
            known = StateExchange(self._optimizer, holder).known(names, operation)
            found += [member.parameter for member in members if member.name in known]
        return [*found, *self._others()]

    def read(self, key: Any) -> State:
        """Return whole state."""
        if not isinstance(key, Tensor):
            return {**self._optimizer.state[key]}
        member = self._member(key)
        operation = f"optimizer.state of {member.name!r} {_TOGETHER}"
        exchange = StateExchange(self._optimizer, member.holder)
        return exchange.whole([member.name], operation)[member.name]

    def replace(self, states: Mapping[Any, State]) -> None:
        """Replace the state of some keys."""
        mine = {self._member(key): states[key] for key in states if isinstance(key, Tensor)}
        self._replace(mine, f"change optimizer.state {_TOGETHER}")
        others = {key: states[key] for key in states if not isinstance(key, Tensor)}
        self._optimizer.state.update(others)

    def reset(self) -> None:
        """Let go of all state."""
        self._replace({each: {} for each in self._members()}, f"clear optimizer.state {_TOGETHER}")
        for key in self._others():
            del self._optimizer.state[key]

    # --- state dicts ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form, on the CPU of every rank."""
        operation = f"optimizer.state_dict() {_TOGETHER}"
        numbers: dict[int, int] = {}  # of the first place of each parameter, by identity
        for number, given in enumerate(self._all):
            numbers.setdefault(given.key, number)
        state: dict[Any, Any] = {
            numbers[member.given.key]: {
                key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in each.items()
            }
            for member, each in self._walk(operation, nbytes=MOST_BYTES)
        }
        groups = [
            {**group, **known.kernels, "params": [numbers[each.key] for each in known.parameters]}
            for group, known in zip(self._optimizer.param_groups, self._groups, strict=True)
        ]
        return {"state": dict(sorted(state.items())) | self._others(), "param_groups": groups}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take whole state in torch's form, of any strategy or of one process."""
        kind, groups = type(self._optimizer).__name__, saved["param_groups"]
        sizes = [len(given.parameters) for given in self._groups]
        found = [len(group["params"]) for group in groups]
        if sizes != found:
            raise UsageError(
                f"expected a state dict of {kind} with {len(sizes)} groups of {sizes} parameters, "
                f"found {len(found)} groups of {found}; make the groups as the run that saved it"
            )
        states = dict(saved["state"])
        numbers = [number for group in groups for number in group["params"]]
        keys = {each.key: number for each, number in zip(self._all, numbers, strict=True)}
        mine = {member: states.pop(keys[member.given.key], {}) for member in self._members()}
        self._replace(mine, f"load a state dict of {kind} {_TOGETHER}")
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            for key in values.keys() - {"params"} - KERNELS:
                group[key] = values[key]
        self._optimizer.state.update({k: v for k, v in states.items() if k not in numbers})
        inner = {"state": self._optimizer.state, "param_groups": self._optimizer.param_groups}
        self._optimizer.__setstate__(inner)

    # --- the members ---

    @property
    def _all(self) -> list[GivenParameter]:
        return [parameter for group in self._groups for parameter in group.parameters]

    def _walk(self, operation: str, nbytes: int) -> Iterator[tuple[StatedParameter, State]]:
        """Yield members that have state, gathered as many at a time as fit into some bytes."""
        for holder, members in self._by_holder():
            exchange = StateExchange(self._optimizer, holder)
            for batch in batched(members, nbytes, attrgetter("given.nbytes")):
                whole = exchange.whole([member.name for member in batch], operation)
                yield from ((member, whole[member.name]) for member in batch if whole[member.name])

    def _replace(self, states: Mapping[StatedParameter, State], operation: str) -> None:
        for holder in self._holders:
            mine = {each.name: state for each, state in states.items() if each.holder is holder}
            if mine:
                StateExchange(self._optimizer, holder).replace(mine, operation)

    def _by_holder(self) -> Iterator[tuple[Holder, list[StatedParameter]]]:
        members = self._members()
        for holder in self._holders:
            yield holder, [each for each in members if each.holder is holder]

    def _members(self) -> list[StatedParameter]:
        return [self._find(each) for each in {each.key: each for each in self._all}.values()]

    def _member(self, parameter: Tensor) -> StatedParameter:
        for each in self._all:
            if each.is_same(parameter):
                return self._find(each)
        raise UsageError(
            f"expected a parameter of the optimizer, found another tensor of shape "
            f"{tuple(parameter.shape)}; take it from the model, or from optimizer.param_groups"
        )

    def _parameters(self, group: GivenGroup) -> list[nn.Parameter]:
        return [self._find(each).parameter for each in group.parameters]

    def _find(self, given: GivenParameter) -> StatedParameter:
        for holder in self._holders:
            if given.key in holder.names:
                return StatedParameter(given, holder)
        raise UsageError(
            "expected groups of parameters of prepared models, found one that was added to the "
            "optimizer before prepare(); use add_param_group() of what prepare() returned"
        )

    def _others(self) -> dict[Any, Any]:
        """Return state that belongs to no parameter, which every rank has."""
        state = self._optimizer.state
        return {key: state[key] for key in state if not isinstance(key, Tensor)}


def refuse_parts(optimizer: Optimizer, whole: Callable[[Optimizer], WholeOptimizer | None]) -> None:
    """Let a script's own optimizer refuse state dicts while ranks divide it."""

    def refuse(*_: Any) -> None:
        if whole(optimizer) is not None:
            raise UsageError(
                f"expected the optimizer that prepare() returned, found the one given to it, a "
                f"{type(optimizer).__name__} with this rank's part of the state; call state_dict() "
                "and load_state_dict() of what prepare() returned"
            )

    Optimizer.__setstate__(optimizer, {})  # a wrapper without torch's own __init__ lacks its hooks
    optimizer.register_state_dict_pre_hook(refuse)
    optimizer.register_load_state_dict_pre_hook(refuse)


# --- copies of a model's whole state ---

SAVE, STATE = "save_pretrained", "state_dict"


def copied_state(module: nn.Module, owner: TrainingState) -> dict[str, Tensor]:
    """Return a module's whole state on every rank's CPU; tied names share a tensor. Collective."""
    facts = owner.facts(module)
    copies: dict[Hashable, Tensor] = {}
    for batch in batched({one.identity: one for one in facts}.values()):
        with owner.whole(module, [one.name for one in batch]) as state:
            for one in batch:
                copies[one.identity] = state[one.name].to("cpu", copy=True)
    return {one.name: copies[one.identity] for one in facts}


def saving_methods(module: nn.Module, owner: TrainingState) -> list[UninheritedMethod]:
    """Return a ``save_pretrained`` that writes whole weights, for each module that has one.

    Args:
        module: the user's model.
        owner: reads its whole tensors.
    """
    found = []
    for name, part in module.named_modules():
        given = getattr(part, SAVE, None)
        if callable(given):
            prefix = f"{clean_name(name)}." if name else ""
            save = partial(_save, part, given, partial(_state_below, prefix, module, owner))
            found.append(UninheritedMethod(part, SAVE, save))
    return found


def _state_below(prefix: str, module: nn.Module, owner: TrainingState) -> dict[str, Tensor]:
    whole = copied_state(module, owner)
    return {name.removeprefix(prefix): t for name, t in whole.items() if name.startswith(prefix)}


def _save(
    part: nn.Module,
    given: Callable[..., Any],
    read: Callable[[], Mapping[str, Tensor]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Let a module save itself, with whole tensors in all its state dicts. Collective."""
    if kwargs.get(STATE) is not None or STATE in part.__dict__:  # given, or within another's save
        return given(*args, **kwargs)
    whole = read()
    shown = [
        UninheritedMethod(
            module, STATE, partial(_shown, whole, clean_name(f"{name}.") if name else "")
        )
        for name, module in part.named_modules()
    ]
    try:
        for method in shown:
            method.put()
        return given(*args, **kwargs)
    finally:
        for method in shown:
            method.take_off()


def _shown(
    whole: Mapping[str, Tensor],
    below: str,
    destination: dict[str, Tensor] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> dict[str, Tensor]:
    """Return what ``Module.state_dict`` would, of the module whose names begin with ``below``."""
    del keep_vars  # they are copies
    found: dict[str, Tensor] = OrderedDict() if destination is None else destination
    for name, tensor in whole.items():
        if name.startswith(below):
            found[prefix + name.removeprefix(below)] = tensor
    return found
