"""The optimizer and the scheduler that the script holds: they step when a window is complete."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drivetrain.errors import UsageError
from drivetrain.parallel.whole_state import WholeOptimizer
from drivetrain.runtime.gradient_state import GradientState

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Where the methods of torch's class register hooks."""


class PreparedOptimizer(Optimizer):
    """Wraps the user's optimizer; inside an unfinished accumulation window it does nothing.

    What stands here under torch's names is whole, also where ranks divide the parameters: then
    reading state gathers it, so that every rank must do it.

    Args:
        given: the user's object.
        optimizer: the strategy's: the same object, or another one bound to shards.
        state: the accumulation window.
        before_step: called before each real step; False skips the step, as after an infinite
            gradient.
        after_step: called after each step, also a skipped one.
        whole: returns the whole of an optimizer that ranks divide; None: each has all of it.
        explained: the context of a step, which explains an allocator's error.

    Attributes:
        steps: how many windows have ended, with skipped steps.
    """

    def __init__(
        self,
        given: Optimizer,
        optimizer: Optimizer,
        state: GradientState,
        before_step: Callable[[Optimizer], bool],
        after_step: Callable[[], None],
        whole: Callable[[Optimizer], WholeOptimizer | None],
        explained: Callable[[], AbstractContextManager[None]],
    ) -> None:
        # Optimizer.__init__ is not called on purpose: groups and state are the wrapped object's.
        self.__dict__.update((name, OrderedDict()) for name in _HOOKS)
        self.given = given
        self.optimizer = optimizer
        self._window = state
        self._before_step = before_step
        self._after_step = after_step
        self._whole_of = whole
        self._explained = explained
        self._skipped = False
        self._used = False
        self.steps = 0

    @property
    def _whole(self) -> WholeOptimizer | None:
        return self._whole_of(self.optimizer)

    @property
    def state(self) -> Any:
        """State by the script's parameters; assign to a parameter's to change or reset it."""
        return (self._whole or self.optimizer).state

    @state.setter
    def state(self, state: Any) -> None:
        if (whole := self._whole) is None:
            self.optimizer.state = state
        else:
            whole.reset()
            whole.replace(state)

    @property
    def param_groups(self) -> Any:
        """Groups with their options, and the script's parameters."""
        return (self._whole or self.optimizer).param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._whole is not None:
            raise UsageError(
                "expected the groups that the optimizer was prepared with, found others that were "
                "assigned to param_groups, whose parameters are divided over the ranks; change "
                "options in the groups, or use load_state_dict() or add_param_group()"
            )
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because of an infinite gradient."""
        return self._skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        (self._whole or self.optimizer).add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, but none of a window that no step has used."""
        self._window.clear(partial(self._clear, set_to_none), used=self._used)

    def _clear(self, set_to_none: bool) -> None:
        self._used = False
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters, at the end of a window only.

        Raises:
            UsageError: a batch was left before its last piece.
        """
        self._window.check_whole()
        if not self._window.sync_gradients:
            return None
        self.steps += 1
        self._used = self._window.stepped = True
        with self._explained():
            self._skipped = not self._before_step(self.optimizer)
            loss = None if self._skipped else self._step(*(() if closure is None else (closure,)))
            self._after_step()
        return loss

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Step between the hooks, which torch calls with the optimizer among the arguments."""
        args = (self, *args)
        for before in self._optimizer_step_pre_hooks.values():
            args, kwargs = before(self, args, kwargs) or (args, kwargs)
        loss = self.optimizer.step(*args[1:], **kwargs)
        for after in self._optimizer_step_post_hooks.values():
            after(self, args, kwargs)
        return loss

    def train(self) -> None:
        """Switch a schedule-free optimizer to training; others have no such switch."""
        _switch(self.optimizer, "train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation; others have no such switch."""
        _switch(self.optimizer, "eval")

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in the form of one process.

        Where ranks divide it, every rank must call this, and gets all of it on its CPU: of AdamW
        twice the bytes of the parameters on each rank. It is gathered some parameters at a time,
        so a device needs about 100 MB more. To save a large model take ``save_state``, where no
        rank needs more than its share.

        Raises:
            CollectiveError: not every rank came.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = (self._whole or self.optimizer).state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take whole state of one process or of any strategy; every rank must call it.

        Raises:
            UsageError: other groups.
            CheckpointError: state of other shapes, or ranks have different ones.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        (self._whole or self.optimizer).load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("given")  # a copy under way has none yet
        kind = type(given).__name__
        if name.startswith("_") or not hasattr(given, name):
            raise AttributeError(f"a prepared {kind} has no attribute {name!r}")
        raise AttributeError(
            f"expected a name that all optimizers of torch have, found {name!r} of {kind}: a "
            "method of its own would step beside the run, and with parts of parameters where ranks "
            "divide them; write it in the loop with p, p.grad and optimizer.step(), and read facts "
            f"as optimizer.optimizer.{name}"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._whole is not None:
            raise UsageError(
                f"expected an optimizer that each rank has whole, found a copy or a pickle of "
                f"{type(self.optimizer).__name__}, whose parameters are divided over the ranks; "
                "take copy.deepcopy(optimizer.state_dict()) on every rank, or "
                "accelerator.save_state()"
            )
        # A copy is on its own: it steps on every call. A scheduler put a "step" of its own there.
        state = {key: value for key, value in self.__dict__.items() if key != "step"}
        return (
            state
            | {name: OrderedDict() for name in _HOOKS}
            | {
                "_window": GradientState(1),
                "_before_step": _take,
                "_after_step": _nothing,
                "_whole_of": _nothing,
                "_explained": nullcontext,
            }
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"

    @property
    def parameters(self) -> Iterable[Tensor]:
        """The parameters of all groups."""
        return (parameter for group in self.param_groups for parameter in group["params"])


@dataclass(eq=False, repr=False)
class PreparedScheduler:
    """Wraps a scheduler, which steps once whenever its optimizers step.

    Attributes:
        scheduler: the user's scheduler, whose other names are found here, too.
        optimizers: the prepared optimizers it drives.
        step_with_optimizer: whether it steps only where they did.
        steps_per_call: 1, or the number of data-parallel ranks for a schedule counted in samples.
    """

    scheduler: Any
    optimizers: list[PreparedOptimizer]
    _window: GradientState
    step_with_optimizer: bool = True
    steps_per_call: int = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule if the optimizers stepped since; inside a window do nothing."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._window.sync_gradients:
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.steps_per_call):
            total = getattr(self.scheduler, "total_steps", None)
            # As many steps as a loop without this library may take; one more is an error of torch.
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped scheduler."""
        return dict(self.scheduler.state_dict())

    def get_last_lr(self) -> list[Any]:
        """Return a list of the learning rates that were computed last, one for each group."""
        return list(self.scheduler.get_last_lr())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_window": GradientState(1)}  # a copy is on its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        # For names not found above: last_epoch, get_last_lr, a scheduler's own methods.
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _take(optimizer: Optimizer) -> bool:
    return True


def _nothing(*_: Any) -> None:
    return


def _switch(optimizer: Optimizer, name: str) -> None:
    method = getattr(optimizer, name, None)
    if callable(method):
        method()
