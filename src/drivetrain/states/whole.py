"""An optimizer of divided parameters as one process has it: groups, state, state dict."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.collectives.facts import differing
from drivetrain.errors import UsageError
from drivetrain.parts.guard import Elsewhere
from drivetrain.states.exchange import GATHERED_BYTES, Holder, State, StateExchange
from drivetrain.states.given import KERNELS, GivenGroup, GivenGroups, GivenParameter
from drivetrain.states.views import GroupView, StateView

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
        return StateExchange(self._optimizer, member.holder).whole([member.name], operation)[
            member.name
        ]

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
        numbers = self._numbers()
        state: dict[Any, Any] = {
            numbers[member.given.key]: {
                key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in each.items()
            }
            for member, each in self._walk(operation, nbytes=GATHERED_BYTES)
        }
        groups = [
            {**group, **given.kernels, "params": [numbers[each.key] for each in given.parameters]}
            for group, given in zip(self._optimizer.param_groups, self._groups, strict=True)
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
            for batch in _batches(members, nbytes):
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

    def _numbers(self) -> dict[int, int]:
        """Return the number of each parameter in a state dict, by identity."""
        numbers: dict[int, int] = {}
        for number, each in enumerate(self._all):
            numbers.setdefault(each.key, number)
        return numbers

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


def _batches(members: Sequence[StatedParameter], nbytes: int) -> Iterator[list[StatedParameter]]:
    batch: list[StatedParameter] = []
    for member in members:
        if batch and sum(each.given.nbytes for each in (*batch, member)) > nbytes:
            yield batch
            batch = []
        batch.append(member)
    if batch:
        yield batch
