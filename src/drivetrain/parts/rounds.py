"""Notices where a synchronised backward begins and ends, from the hooks of its parameters.

A round begins with the first gradient of a backward. The end is whichever comes first: a callback
of the autograd engine at the end of the backward, the strategy's own call after it, or the next
round, after an exception. Backward inside a custom function's backward (reentrant checkpointing)
belongs to the round around it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

_OF_STRATEGY = "of_strategy"
"""The attribute of a strategy's hooks."""

_current_task: Callable[[], int] = torch._C._current_graph_task_id


class Rounds:
    """The rounds of one model.

    Args:
        begin: called when a round begins.
        end: called when a round ends; must send the rest.

    Attributes:
        count: rounds begun so far.
        reentrant: whether a gradient may come more than once in a round.
        synchronizing: whether a backward is a round; if not, gradients stay where they are.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.count = 0
        self.synchronizing = True
        self.reentrant = False
        self._begin = begin
        self._end = end
        self._task: int | None = None

    @property
    def under_way(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._task is not None

    def enter(self) -> None:
        """Join the round of the running backward, or begin a round: called by every hook."""
        task = _current_task()
        if task == self._task:
            return
        nested = _inside_backward()
        if self._task is not None and task > self._task:
            if nested:
                self.reentrant = True
                return
            self.finish()  # an exception cut the round short
        if self._task is None:
            self.count += 1
            self._begin()
        self.reentrant |= nested
        self._task = task
        if not nested:
            Variable._execution_engine.queue_callback(self.finish)

    def take_part(self) -> None:
        """Run a whole round without any gradient: other ranks may have some."""
        if self._task is None:
            self.count += 1
            self._begin()
            self._task = -1
        self.finish()

    def finish(self) -> None:
        """End the round, if one is under way."""
        if self._task is None:
            return
        try:
            with torch.no_grad():
                self._end()
        finally:
            self._task = None

    def give_up(self) -> None:
        """Forget a round under way: nothing more is sent for it."""
        self._task = None


def in_backward() -> bool:
    """Return whether this thread runs inside a backward, for example in a recomputed forward."""
    return _current_task() != -1


def after_backward(action: Callable[[], None]) -> None:
    """Call an action when the backward that runs now is over."""
    Variable._execution_engine.queue_callback(action)


def mark_of_strategy(hook: Callable[..., Any]) -> None:
    """Let a hook on a parameter be a strategy's: it runs within backward, as autograd calls it."""
    vars(getattr(hook, "__func__", hook))[_OF_STRATEGY] = True


def on_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a strategy's hook when a parameter's gradient has been accumulated."""
    mark_of_strategy(hook)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def is_of_strategy(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is a strategy's, and none of the script."""
    return hasattr(hook, _OF_STRATEGY)


def _inside_backward() -> bool:
    """Whether this backward runs inside a custom function's backward: reentrant checkpointing."""
    code = BackwardCFunction.apply.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# --- a script's hooks on parameters, run with the gradients that one process would give them ---

# Autograd would run them on each rank with the gradient of that rank's rows of one micro-batch. So
# a backward goes on without them, and when the gradients of a window are averaged they run with
# these: as in one process with one batch as large as the window's.


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
