"""Whole optimizer state from the shares of all ranks, and each rank's share from whole state."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.checkpoint.agreement import check_same, together
from drivetrain.checkpoint.manifest import copy_overlap, numel
from drivetrain.collectives.facts import device_of, group_of, meet_everyone, size_of
from drivetrain.collectives.meeting import named
from drivetrain.communication import gather_object
from drivetrain.errors import RankMismatchError
from drivetrain.nested import describe
from drivetrain.shards import Part
from drivetrain.strategy import Strategy

GATHERED_BYTES = 32 * 2**20
"""State is gathered of as many parameters at a time as fit into this: small ones share a sum."""

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
        self._group = holder.strategy.states_among
        self._world = holder.strategy.run.world
        held = {**holder.names, **holder.strategy.names()}
        self._plain: Told = {}
        for parameter, state in optimizer.state.items():
            plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            if plain and id(parameter) in held:
                self._plain[held[id(parameter)]] = plain

    def known(self, names: Sequence[str], operation: str) -> set[str]:
        """Return the parameters of which some rank has state."""
        self._meet(operation)
        mine = {shard.name for shard in self._holder.strategy.states(self._holder.index, names)}
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
        shards = list(self._holder.strategy.states(self._holder.index, names))
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
        load = partial(holder.strategy.load_states, holder.index, reader, states.keys())
        together(self._world, operation, load, self._group)

    def _meet(self, operation: str) -> None:
        meet_everyone(operation, self._group)

    def _room(self, told: Told) -> tuple[Tensor, Told]:
        """Return zeros, and the state with a place among them for each tensor."""
        facts = [each for state in told.values() for each in state.values() if _is_tensor(each)]
        device = torch.device(facts[0].device if facts else "cpu")
        if size_of(self._group) > 1:
            device = device_of(self._group, device) or device
        memory = torch.zeros(sum(map(_room_of, facts)), dtype=torch.uint8, device=device)
        start = 0
        found: Told = {}
        for name, state in told.items():
            found[name] = dict(state)
            for key, each in state.items():
                if _is_tensor(each):
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


def _is_tensor(facts: Any) -> bool:
    return isinstance(facts, StateFacts)


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
            counts[key] += each.elements if _is_tensor(each) else 0
    for key, each in told.items():
        if _is_tensor(each) and counts[key] != prod(each.shape):
            raise RankMismatchError(
                f"expected {prod(each.shape)} elements of state {key!r} of {name!r} on all ranks "
                f"together, found {counts[key]}; ranks have stepped differently: load a checkpoint"
            )
    return told
