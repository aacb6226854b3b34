"""Puts fragments into optimizers' groups in the place of parameters; the objects stay the user's.

Group dictionaries stay the same objects, so schedulers and weight decay go on working. State that
an optimizer already has is cut like the parameter it belongs to.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.errors import UsageError
from drivetrain.sharding.layout import Cut
from drivetrain.sharding.slot import Slot
from drivetrain.sharding.suitability import check_suits
from drivetrain.sharding.unit import Unit
from drivetrain.store import ShardStepper

_FUSED = (SGD, Adam, AdamW, Adagrad)
"""Optimizers whose fused kernel does the same arithmetic in one pass over memory."""

_EXACT = (torch.float32, torch.float64)
"""Dtypes in which it rounds alike; in others it computes in fp32, where torch's loops do not."""


@dataclass(slots=True)
class Bound:
    """One optimizer and the parameters that it trains.

    Attributes:
        optimizer: the user's object.
        slots: by name; the same on every rank, also where this rank owns nothing of them.
        stepper: takes steps in its place, for what a store keeps; None: nothing is kept.
        handles: of the hooks on it.
    """

    optimizer: Optimizer
    slots: dict[str, Slot] = field(default_factory=dict)
    stepper: ShardStepper | None = None
    handles: list[RemovableHandle] = field(default_factory=list)

    @property
    def units(self) -> set[Unit]:
        """The units that its step changes."""
        return {slot.unit for slot in self.slots.values()}

    @property
    def fragments(self) -> dict[Tensor, Slot]:
        """Its parameters by what the optimizer holds in their places."""
        slots = self.slots.values()
        return {slot.fragment: slot for slot in slots if slot.fragment is not None}

    def members(self) -> Iterator[tuple[Slot, nn.Parameter, Mapping[str, Any]]]:
        """Yield its parameters, what it holds in their places, and their groups as they are."""
        slots = self.fragments
        for group in self.optimizer.param_groups:
            for fragment in group["params"]:
                if fragment in slots:
                    yield slots[fragment], fragment, group


class Watch(Protocol):
    """Is told about the optimizers of a model."""

    def bound(self, bound: Bound) -> None:
        """An optimizer holds fragments, perhaps more of them than before."""

    def before_step(self, bound: Bound) -> None:
        """An optimizer is about to step."""

    def after_step(self, bound: Bound) -> None:
        """An optimizer has stepped."""

    def cleared(self, slots: Iterable[Slot], *, set_to_none: bool) -> None:
        """The gradients of these parameters are about to be cleared."""


class Binding:
    """The optimizers of one model.

    Args:
        slots: the parameters that lie in units; grows when more do.
        cut: what ranks own of parameters.
        fused: whether to take the fused kernel where the user left the choice open.
        watch: is told about optimizers and their steps.
    """

    def __init__(
        self,
        slots: Mapping[nn.Parameter, Slot],
        *,
        cut: Cut,
        fused: bool,
        watch: "Watch",
    ) -> None:
        self._slots = slots
        self._cut = cut
        self._fused = fused
        self._watch = watch
        self._bound: list[Bound] = []

    def __iter__(self) -> Iterator[Bound]:
        return iter(self._bound)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot step what a rank owns.

        Raises:
            UsageError: says which partition it needs.
        """
        check_suits(optimizer, self._cut)

    def add(self, optimizer: Optimizer) -> None:
        """Bind one more optimizer."""
        bound = Bound(optimizer)
        self._rebind(bound)
        self._bound.append(bound)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._adopt_strays(bound)
            _check_gradients(bound)
            if bound.stepper is not None and any((*args[1:], *kwargs.values())):
                raise UsageError(
                    "expected step() without a closure, found one: a store takes the steps of an "
                    "offloaded optimizer; compute the loss before step()"
                )
            self._watch.before_step(bound)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._watch.after_step(bound)

        bound.handles.append(optimizer.register_step_pre_hook(before))
        bound.handles.append(optimizer.register_step_post_hook(after))
        self._take_zero_grad(bound)

    def close(self) -> None:
        """Take the hooks off."""
        for bound in self._bound:
            for handle in bound.handles:
                handle.remove()
            bound.optimizer.__dict__.pop("zero_grad", None)

    def _take_zero_grad(self, bound: Bound) -> None:
        """Let ``zero_grad`` reach gradients of micro-batches that were not sent, too.

        It lies in the optimizer's ``__dict__``, which copies and pickles of optimizers leave out.
        """
        given = bound.optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            self._adopt_strays(bound)
            # First: it may end a backward that was cut short.
            self._watch.cleared(bound.slots.values(), set_to_none=set_to_none)
            given(set_to_none)

        bound.optimizer.__dict__["zero_grad"] = zero_grad

    def _adopt_strays(self, bound: Bound) -> None:
        """Bind whole parameters that came into the groups, as by ``add_param_group``."""
        groups = bound.optimizer.param_groups
        if any(p in self._slots for group in groups for p in group["params"]):
            self._rebind(bound)

    def _rebind(self, bound: Bound) -> None:
        for group in bound.optimizer.param_groups:
            held = [self._replace(bound, parameter) for parameter in group["params"]]
            group["params"] = [one for one in held if one is not None]
            if self._fused and type(bound.optimizer) in _FUSED and _leaves_choice(group):
                group["fused"] = True
        self._watch.bound(bound)

    def _replace(self, bound: Bound, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return what stands in a parameter's place; None where this rank owns nothing of it."""
        slot = self._slots.get(parameter)
        if slot is None:
            return parameter
        bound.slots[slot.name] = slot
        fragment = slot.flat.fragment(slot)
        state = bound.optimizer.state.pop(parameter, None)
        if state is not None and fragment is not None:
            bound.optimizer.state[fragment] = {k: _cut(v, slot, fragment) for k, v in state.items()}
        return fragment


def _check_gradients(bound: Bound) -> None:
    # Every step comes here, and a guarded parameter answers slowly.
    with torch._C.DisableTorchFunctionSubclass():
        given = [name for name, slot in bound.slots.items() if slot.parameter.grad is not None]
    if given:
        raise UsageError(
            f"expected gradients that backward made, found one that was set on {given[0]!r} and "
            "that no rank would step with; change a gradient by a hook of the parameter, or "
            "in place after backward, through accelerator.strategy_of(model).gradients()"
        )


def _cut(value: Any, slot: Slot, fragment: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != slot.shape or not slot.shape:
        return value
    owned = slot.in_memory_order(value)[slice(*slot.owned)].clone()
    return owned.as_strided(fragment.shape, fragment.stride())


def _leaves_choice(group: Mapping[str, Any]) -> bool:
    # The fused kernel of SGD wants momentum of all parameters or of none: not so after thawing.
    others = ("capturable", "differentiable", "momentum")
    return (
        group.get("foreach") is None
        and group.get("fused") is None
        and not any(group.get(option) for option in others)
        and all(parameter.dtype in _EXACT for parameter in group["params"])
    )
