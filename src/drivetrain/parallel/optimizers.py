"""Fragments in optimizers' groups in the place of parameters; the optimizers stay the user's.

Group dictionaries stay the same objects, so schedulers and weight decay go on working. State that
an optimizer already has is cut like the parameter it belongs to.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from drivetrain.errors import UsageError
from drivetrain.parallel.gather import StepEvents
from drivetrain.parallel.layout import CutStyle, ParameterSlot
from drivetrain.parallel.optimizer_backend import BoundOptimizer
from drivetrain.parallel.placement import Placement
from drivetrain.parallel.suitability import misfit

_FUSED = (SGD, Adam, AdamW, Adagrad)
"""Optimizers whose fused kernel does the same arithmetic in one pass over memory."""

_EXACT = (torch.float32, torch.float64)
"""Dtypes in which it rounds alike; in others it computes in fp32, where torch's loops do not."""

_PIECES: Mapping[CutStyle, tuple[str, str]] = {
    "flat": ("ranges of flattened parameters", "set partition: parameter"),
    "rows": ("some rows of a parameter", "take a strategy with partition: parameter"),
}
"""The parts of a parameter that ranks own, and the way out for who cannot step them."""


_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""The code of torch's that calls the hooks around a step."""

StepHook = Callable[[Optimizer, Any, Any], None]


def outermost(hook: StepHook) -> StepHook:
    """Return a hook for ``register_step_pre_hook`` or ``register_step_post_hook``, once a step.

    A class whose ``step`` calls that of its base has two, and torch calls all hooks around both,
    unless nobody has made an object of the base before.
    """

    def once(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
        calls = (frame for frame in frames if frame.f_code is _STEP)
        if sum(frame.f_locals["self"] is optimizer for frame in calls) <= 1:
            hook(optimizer, args, kwargs)

    return once


def check_suits(optimizer: Optimizer, cut: CutStyle) -> None:
    """Refuse an optimizer that cannot step a rank's fragments.

    Args:
        optimizer: left as it is.
        cut: how parameters are divided among ranks.

    Raises:
        UsageError: says what the optimizer needs.
    """
    found = misfit(optimizer, cut)
    if found is None:
        return
    name = type(optimizer).__name__
    if found.needs_matrices:
        pieces, way_out = _PIECES[cut]
        raise UsageError(
            f"expected an element-wise optimizer, since ranks own {pieces}, found {name}, whose "
            f"step {found.why}; {way_out}"
        )
    raise UsageError(
        f"expected an optimizer that steps each parameter by itself, found {name}, whose step "
        f"{found.why}; use a strategy that replicates parameters"
    )


_SWITCHES = ("train", "eval")
"""Methods of schedule-free optimizers."""


@dataclass(eq=False, repr=False)
class Fragments:
    """The fragments that the optimizers of one model hold.

    Attributes:
        placement: the parameters that lie in units, and who steps them; more may come.
        step: is told about optimizers' steps.
        fused: whether to take the fused kernel where the user left the choice open.
    """

    placement: Placement
    step: StepEvents
    fused: bool
    _bound: dict[Optimizer, BoundOptimizer] = field(default_factory=dict)

    def __iter__(self) -> Iterator[BoundOptimizer]:
        return iter(self._bound.values())

    def add(self, optimizer: Optimizer) -> None:
        """Bind one more optimizer."""
        bound = BoundOptimizer(optimizer)
        self._rebind(bound)
        self._bound[optimizer] = bound
        bound.handles.append(optimizer.register_step_pre_hook(outermost(self._before_step)))
        bound.handles.append(optimizer.register_step_post_hook(outermost(self._after_step)))
        self._take_zero_grad(bound)
        for name in _SWITCHES:
            self._take_switch(bound, name)

    def close(self) -> None:
        """Take the hooks off."""
        for bound in self:
            for handle in bound.handles:
                handle.remove()
            for name in ("zero_grad", *_SWITCHES):
                bound.optimizer.__dict__.pop(name, None)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        bound = self._bound[optimizer]
        self._adopt_strays(bound)
        if any((*args[1:], *kwargs.values())) and self.placement.backend.steps(bound):
            raise UsageError(
                "expected step() without a closure, found one: a store takes the steps of an "
                "offloaded optimizer; compute the loss before step()"
            )
        self.step.before_step(bound)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.step.after_step(self._bound[optimizer])

    def _take_zero_grad(self, bound: BoundOptimizer) -> None:
        """Let ``zero_grad`` reach gradients of micro-batches that were not sent, too.

        It lies in the optimizer's ``__dict__``, which copies and pickles of optimizers leave out.
        """
        given = bound.optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            self._adopt_strays(bound)
            # First: it may end a backward that was cut short.
            self.step.before_zero_grad(bound, set_to_none=set_to_none)
            given(set_to_none)

        bound.optimizer.__dict__["zero_grad"] = zero_grad

    def _take_switch(self, bound: BoundOptimizer, name: str) -> None:
        """Let parameters follow a schedule-free optimizer, whose switches write into fragments."""
        given = getattr(bound.optimizer, name, None)
        if not callable(given):
            return

        def switch() -> None:
            self.placement.wait_for_values()  # the last step's values are still being sent
            self.placement.take_changes()
            given()
            self.step.after_step(bound)

        bound.optimizer.__dict__[name] = switch

    def adopt_strays(self) -> None:
        """Bind whole parameters that came into the groups of any optimizer."""
        for bound in self:
            self._adopt_strays(bound)

    def _adopt_strays(self, bound: BoundOptimizer) -> None:
        """Bind whole parameters that came into the groups, as by ``add_param_group``."""
        slots = self.placement.slots
        for group in bound.optimizer.param_groups:
            if not slots.keys().isdisjoint(group["params"]):
                self._rebind(bound)
                return

    def _rebind(self, bound: BoundOptimizer) -> None:
        for group in bound.optimizer.param_groups:
            held = [self._replace(bound, parameter) for parameter in group["params"]]
            group["params"] = [one for one in held if one is not None]
            if self.fused and type(bound.optimizer) in _FUSED and _leaves_choice(group):
                group["fused"] = True
        self.placement.backend.adopt(bound)

    def _replace(self, bound: BoundOptimizer, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the fragment in a parameter's place; None if this rank has no share."""
        slot = self.placement.slots.get(parameter)
        if slot is None:
            return parameter
        bound.slots[slot.name] = slot
        bound.units.add(self.placement.unit_of(slot))
        fragment = self.placement.flat_of(slot).fragment(slot)
        state = bound.optimizer.state.pop(parameter, None)
        if fragment is not None:
            bound.fragments[fragment] = slot
            bound.held[slot] = fragment
            if state is not None:
                cut = {key: _cut(value, slot) for key, value in state.items()}
                bound.optimizer.state[fragment] = cut
        return fragment


def _cut(value: Any, slot: ParameterSlot) -> Any:
    if not isinstance(value, Tensor) or value.shape != slot.shape or not slot.shape:
        return value
    return slot.cut(value)


def _leaves_choice(group: Mapping[str, Any]) -> bool:
    # The fused kernel of SGD wants momentum of all parameters or of none: not so after thawing.
    others = ("capturable", "differentiable", "momentum")
    return (
        group.get("foreach") is None
        and group.get("fused") is None
        and not any(group.get(option) for option in others)
        and all(parameter.dtype in _EXACT for parameter in group["params"])
    )
