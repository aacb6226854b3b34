"""Follows which module computes: in its forward, in a recomputed forward, in its backward.

The backward of a module begins with the gradient of one of its results, and ends with that of one
of its inputs, or where another module's begins. Modules whose call is compiled are followed as one:
hooks inside would compile them anew.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from drivetrain.model.valueless import ValuelessTensor
from drivetrain.parts.blocks import COMPILED_CALL
from drivetrain.parts.guard import Arguments, Keywords
from drivetrain.parts.naming import uncompiled
from drivetrain.parts.rounds import after_backward, in_backward
from drivetrain.parts.wrapping import UninheritedHook, is_compiled_call

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"
"""The phases: ``again`` is a forward that is recomputed in backward."""

OUTSIDE = ""
"""The name of the module where no module computes."""


class ModulePlace(NamedTuple):
    """The part of a step at hand.

    Attributes:
        phase: ``forward``, ``again`` or ``backward``.
        module: name of the innermost module, after that of its model, such as ``GPT.blocks.3``.
    """

    phase: str
    module: str


@dataclass(frozen=True, slots=True, eq=False)
class _ModuleCall:
    """One call of a module, and the call around it."""

    module: str
    around: "_ModuleCall | None"


class ModuleTrail:
    """Follows the modules of some models from now until ``close``.

    Args:
        models: by name.
        turned: is told of each new place, when it begins.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], turned: Callable[[ModulePlace], None]
    ) -> None:
        self._turned = turned
        self._phase, self._call = FORWARD, _NO_CALL
        self._before: list[tuple[str, _ModuleCall]] = []  # each forward under way
        self._open = True
        self._ends_soon = False
        self._handles: list[RemovableHandle] = []
        self._compiled: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._names: dict[int, str] = {}
        for name, model in models.items():
            self._watch(name, model)

    @property
    def place(self) -> ModulePlace:
        """The place at hand."""
        if self._call is _NO_CALL:
            return ModulePlace(BACKWARD if in_backward() else FORWARD, OUTSIDE)
        return ModulePlace(self._phase, self._call.module)

    def close(self) -> None:
        """Take the hooks off."""
        self._open = False
        for handle in self._handles:
            handle.remove()
        for module, call in self._compiled:
            module.__dict__[COMPILED_CALL] = call
        self._handles.clear()
        self._compiled.clear()

    def enter(self, model: nn.Module) -> None:
        """Enter a model whose forward has begun before this trail."""
        name = self._names.get(id(model))
        if name is not None and not self._before:
            self._enter(name, (), {})

    # --- the hooks ---

    def _watch(self, name: str, module: nn.Module) -> None:
        if id(module) in self._names:
            return
        self._names[id(module)] = name
        if is_compiled_call(module):
            self._watch_compiled(name, module)
            return

        def enter(module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
            self._enter(name, args, kwargs)

        def leave(module: nn.Module, args: Any, outputs: Any) -> None:
            self._leave(outputs)

        self._handles += [
            module.register_forward_pre_hook(
                UninheritedHook(enter), prepend=True, with_kwargs=True
            ),
            module.register_forward_hook(UninheritedHook(leave), always_call=True),
        ]
        if uncompiled(module) is module:
            for child, inner in module.named_children():
                self._watch(f"{name}.{child}", inner)

    def _watch_compiled(self, name: str, module: nn.Module) -> None:
        call = module.__dict__[COMPILED_CALL]

        def followed(*args: Any, **kwargs: Any) -> Any:
            outputs = None
            self._enter(name, args, kwargs)
            try:
                outputs = call(*args, **kwargs)
            finally:
                self._leave(outputs)
            return outputs

        self._compiled.append((module, call))
        module.__dict__[COMPILED_CALL] = followed

    def _enter(self, name: str, args: Arguments, kwargs: Keywords) -> None:
        self._before.append((self._phase, self._call))
        call = _ModuleCall(name, self._call)
        self._go(AGAIN if in_backward() else FORWARD, call)

        def end(gradient: Tensor) -> None:
            if self._is_inside(call):
                self._go_backward(call.around or _NO_CALL)

        self._when_gradient_comes((args, kwargs), end)

    def _leave(self, outputs: Any) -> None:
        if not (self._open and self._before):  # it was entered before the trail began
            return
        call = self._call
        self._go(*self._before.pop())

        def begin(gradient: Tensor) -> None:
            # A result of a module inside may be that of this one, too: the one inside comes first.
            if not (self._phase == BACKWARD and self._is_inside(call)):
                self._go_backward(call)

        self._when_gradient_comes(outputs, begin)

    def _is_inside(self, call: _ModuleCall) -> bool:
        here: _ModuleCall | None = self._call
        while here is not None and here is not call:
            here = here.around
        return here is call

    def _when_gradient_comes(self, values: Any, action: Callable[[Tensor], None]) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(values):
            if not isinstance(leaf, Tensor) or isinstance(leaf, ValuelessTensor):
                continue
            if leaf.requires_grad:
                self._handles.append(leaf.register_hook(action))  # type: ignore[no-untyped-call]

    def _go_backward(self, call: _ModuleCall) -> None:
        if not self._open:
            return
        if not self._ends_soon:
            self._ends_soon = True
            after_backward(self._end_backward)
        self._go(BACKWARD, call)

    def _end_backward(self) -> None:
        self._ends_soon = False
        if self._open:
            self._go(FORWARD, _NO_CALL)

    def _go(self, phase: str, call: _ModuleCall) -> None:
        self._phase, self._call = phase, call
        self._turned(self.place)


_NO_CALL = _ModuleCall(OUTSIDE, None)
