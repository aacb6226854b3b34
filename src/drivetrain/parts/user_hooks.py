"""A script's hooks on parameters, run with the gradients that one process would give them.

Autograd would run them on each rank with the gradient of that rank's rows of one micro-batch. So a
backward goes on without them, and when the gradients of a window are averaged they run with these:
as in one process with one batch as large as the window's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.parts.rounds import is_of_strategy

Hooks = dict[int, Callable[..., Any]]


class UserHooks:
    """The hooks on the parameters of one model.

    Args:
        parameters: the model's.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._earlier: dict[nn.Parameter, Tensor | None] = {}

    def found(self) -> list[nn.Parameter]:
        """Return the parameters that have hooks of the script now."""
        # Every backward asks every parameter, and a guarded one answers slowly.
        with torch._C.DisableTorchFunctionSubclass():
            return [
                parameter
                for parameter in self._parameters
                if _has_script(parameter._backward_hooks)
                or _has_script(parameter._post_accumulate_grad_hooks)
            ]

    @contextmanager
    def aside(self, hooked: Sequence[nn.Parameter], *, averages: bool) -> Iterator[None]:
        """Run a backward without hooks, and then the hooks if gradients are averaged now.

        Args:
            hooked: the parameters with hooks.
            averages: whether the backward ends with averaged gradients.
        """
        for parameter in hooked:
            if parameter not in self._earlier:  # hooks are for what this window's backwards bring
                earlier = parameter.grad
                self._earlier[parameter] = None if earlier is None else earlier.clone()
                parameter.grad = None
        taken = [_take(parameter) for parameter in hooked]
        try:
            yield
        except BaseException:
            for parameter in hooked:
                if parameter.grad is None:
                    parameter.grad = self._earlier[parameter]
            self.forget()
            raise
        finally:
            for parameter, (before, after) in zip(hooked, taken, strict=True):
                _put_back(parameter, before, after)
        if averages:
            for parameter, (before, after) in zip(hooked, taken, strict=True):
                self._run(parameter, before, after)

    def forget(self) -> None:
        """Forget gradients of before a window that was given up: the next one begins."""
        self._earlier.clear()

    def _run(self, parameter: nn.Parameter, before: Hooks, after: Hooks) -> None:
        earlier, gradient = self._earlier.pop(parameter), parameter.grad
        if gradient is None:
            parameter.grad = earlier
            return
        with torch.no_grad():
            for hook in before.values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            gradient = gradient if earlier is None else gradient + earlier
            if gradient is not parameter.grad:
                parameter.grad = gradient
            for hook in after.values():
                hook(parameter)


def _has_script(hooks: Hooks | None) -> bool:
    """Return whether there is a hook of the script among those of a parameter."""
    return not all(map(is_of_strategy, hooks.values())) if hooks else False


def _of_script(hooks: Hooks | None) -> Hooks:
    """Return the script's hooks among those of a parameter."""
    return {key: hook for key, hook in (hooks or {}).items() if not is_of_strategy(hook)}


def _take(parameter: nn.Parameter) -> tuple[Hooks, Hooks]:
    """Take the script's hooks off, and return them."""
    # The very dicts, which the handles of the hooks know.
    lists: Any = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    before, after = (_of_script(hooks) for hooks in lists)
    for hooks, taken in zip(lists, (before, after), strict=True):
        for key in taken:
            del hooks[key]
    return before, after


def _put_back(parameter: nn.Parameter, before: Hooks, after: Hooks) -> None:
    for there, hooks in (
        (parameter._backward_hooks, before),
        (parameter._post_accumulate_grad_hooks, after),
    ):
        if there is not None:
            there.update(hooks)
