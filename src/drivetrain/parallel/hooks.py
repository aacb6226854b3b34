"""The hooks of one model: the named methods of its strategy that a step calls, and where.

Everything that happens in a step begins in one of these hooks, in an optimizer's hooks
(``optimizers.py``) or in ``backward``. Copies and pickles of the model do not inherit them: these
are ordinary models.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from drivetrain.model.modules import UninheritedHook, clean_name
from drivetrain.parallel.backward import on_gradient
from drivetrain.parallel.gather import Gather, refusal
from drivetrain.parallel.gradients import UnitGradients
from drivetrain.parallel.home import BoundOptimizer
from drivetrain.parallel.layout import ROOT, ParameterSlot
from drivetrain.parallel.replicated import ForwardHook
from drivetrain.parallel.unit import Unit


class StepEvents(Protocol):
    """The events of a step, in their order: a strategy has a method for each event."""

    def before_forward(self) -> None:
        """A training forward of the model begins."""

    def before_compiled_forward(self) -> None:
        """A forward of a compiled model begins, which asks no guards."""

    def gradient_came(self, unit: UnitGradients, slot: ParameterSlot) -> None:
        """Autograd has accumulated a parameter's gradient."""

    def before_step(self, bound: BoundOptimizer) -> None:
        """An optimizer is about to step."""

    def after_step(self, bound: BoundOptimizer) -> None:
        """An optimizer has stepped."""

    def before_zero_grad(self, bound: BoundOptimizer | None, *, set_to_none: bool) -> None:
        """Gradients are about to be cleared: those of an optimizer, or of the whole model."""


class StepHooks:
    """The hooks on one model, its modules and its parameters.

    Args:
        model: the user's model.
        gather: gathers its sharded units.
        step: is told what happens.
    """

    def __init__(self, model: nn.Module, gather: Gather, step: StepEvents) -> None:
        self._model = model
        self._step = step
        self._gradients: dict[ParameterSlot, RemovableHandle] = {}
        self._handles = [model.register_forward_pre_hook(ForwardHook(step.before_forward))]
        if is_compiled(model):
            wait = UnitHook(lambda module, inputs: step.before_compiled_forward())
            self._handles.append(model.register_forward_pre_hook(wait))
        model.__dict__["zero_grad"] = ZeroGrad(model, step)
        if gather.units:
            held = UnitHook(lambda *_: _check_held(gather.units))  # torch wraps guards' errors
            loads = model.register_load_state_dict_pre_hook(held)  # type: ignore[no-untyped-call]
            self._handles.append(loads)
            self._watch_modules(gather)

    def watch_gradients(self, units: Sequence[UnitGradients]) -> None:
        """Follow changes of ``requires_grad``; every rank must make the same ones."""
        # A guarded parameter answers slowly, and here every one is asked, twice per step.
        with torch._C.DisableTorchFunctionSubclass():
            for unit in units:
                for slot in unit.unit.slots:
                    if slot.parameter.requires_grad is not (slot in self._gradients):
                        self._follow(unit, slot)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in (*self._handles, *self._gradients.values()):
            handle.remove()
        self._handles, self._gradients = [], {}
        self._model.__dict__.pop("zero_grad", None)

    def _follow(self, unit: UnitGradients, slot: ParameterSlot) -> None:
        fragment = unit.of[slot].flat.fragments.get(slot)
        if fragment is not None:  # a strategy around this one asks which fragments are stepped
            fragment.requires_grad_(slot.parameter.requires_grad)
        if slot in self._gradients:
            self._gradients.pop(slot).remove()
            return
        step = self._step
        # For good: a gradient of today still steps a parameter that is frozen tomorrow.
        unit.of[slot].flat.trained = True

        def came(parameter: Tensor) -> None:  # a closure, since it runs for each parameter
            step.gradient_came(unit, slot)

        self._gradients[slot] = on_gradient(slot.parameter, came)

    def _watch_modules(self, gather: Gather) -> None:
        model = self._model
        begin = UnitHook(lambda module, inputs: gather.begin_forward())
        end = UnitHook(lambda module, inputs, outputs: gather.end_forward(outputs))
        self._handles += [
            model.register_forward_pre_hook(begin, prepend=True),
            model.register_forward_hook(end, always_call=True),
        ]
        for module, units in users(model, gather.units).items():
            hook = ModuleHook(gather, units)
            self._handles += [
                module.register_forward_pre_hook(UnitHook(hook.enter), with_kwargs=True),
                module.register_forward_hook(UnitHook(hook.leave), always_call=True),
            ]


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model is the result of ``torch.compile``."""
    return isinstance(getattr(model, "_orig_mod", None), nn.Module)


def _check_held(units: Sequence[Unit]) -> None:
    """Refuse writes into all parameters, unless the script has gathered them.

    Raises:
        UsageError: a unit is divided.
    """
    for unit in units:
        if not unit.holds:
            raise refusal(unit, unit.parameters[0])


class UnitHook(UninheritedHook):
    """A hook that copies of a module do not inherit, and that a compiler does not look into."""

    @_disable_dynamo  # in a block that compiles its own hooks too: a gap in the graph
    def __call__(self, *arguments: Any) -> None:
        """Act."""
        if self._action is not None:
            self._action(*arguments)


class ZeroGrad:
    """Stands in for a model's ``zero_grad``: clears the fragments' gradients too.

    It lies in the module's ``__dict__``; copies and pickles of the model clear their own gradients.

    Args:
        module: the model.
        step: is told; None: nobody is.
    """

    def __init__(self, module: nn.Module, step: StepEvents | None) -> None:
        self._module = module
        self._step = step

    def __call__(self, set_to_none: bool = True) -> None:
        """Clear all gradients of the model."""
        type(self._module).zero_grad(self._module, set_to_none)
        if self._step is not None:
            self._step.before_zero_grad(None, set_to_none=set_to_none)

    def __reduce__(self) -> tuple[type["ZeroGrad"], tuple[nn.Module, None]]:
        return ZeroGrad, (self._module, None)


# --- modules ---


def users(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Return which units each module needs whole while its forward runs.

    Those are the unit that is named after it, and units of parameters that are tied to its own.
    """
    if is_compiled(model):
        # Its inside is one graph, which hooks on parts of it would break.
        return {model: list(units)} if units else {}
    modules = {clean_name(name): module for name, module in model.named_modules()}
    found: dict[nn.Module, list[Unit]] = {}
    for unit in units:
        key = unit.layout.key
        if key == ROOT:
            continue
        own = [modules[key]] if key in modules else []
        for module in (*own, *_tied(modules, unit)):
            found.setdefault(module, []).append(unit)
    return found


def _tied(modules: dict[str, nn.Module], unit: Unit) -> Iterator[nn.Module]:
    """Yield the modules outside of a unit's own module that hold a parameter of the unit."""
    inside = f"{unit.layout.key}."
    held = {id(parameter) for parameter in unit.parameters}
    for name, module in modules.items():
        outside = name != unit.layout.key and not name.startswith(inside)
        if outside and any(id(p) in held for p in module._parameters.values()):
            yield module


class ModuleHook:
    """The hooks of one module around its forward and its backward.

    Args:
        gather: gathers the units before the forward, and frees them after each of both.
        units: the units that the module needs, those of several dtypes apart.
    """

    def __init__(self, gather: Gather, units: Sequence[Unit]) -> None:
        self._gather = gather
        self._units = units

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Gather the units, and free them when backward has passed the inputs."""
        self._gather.enter(self)
        for unit in self._units:
            self._gather.bring(unit)
        if torch.is_grad_enabled():
            inputs = []
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                    inputs.append(leaf)
            hook = CountedHook(len(inputs), self._units, self._gather)
            for leaf in inputs:
                leaf.register_hook(hook)  # type: ignore[no-untyped-call]  # dies with the graph

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Free the units after forward; after an exception the model's own hook does."""
        if outputs is not None:
            for unit in self._units:
                self._gather.put_away(unit, outputs)
        self._gather.leave(self)


class CountedHook:
    """A hook of a module's inputs: when the gradients of all of them have come, units are freed.

    It holds nothing of the graph: autograd's nodes keep their hooks, and a hook that keeps nodes
    makes a cycle that is never freed. (``register_multi_grad_hook`` does.)

    Args:
        count: how many inputs there are.
        units: the units that the module needs.
        gather: frees them.
    """

    def __init__(self, count: int, units: Sequence[Unit], gather: Gather) -> None:
        self._count = count
        self._units = units
        self._gather = gather
        self._seen = 0

    def __call__(self, gradient: Tensor) -> None:
        """Count one gradient."""
        self._seen += 1
        if self._seen % self._count == 0:
            for unit in self._units:
                self._gather.release(unit)
