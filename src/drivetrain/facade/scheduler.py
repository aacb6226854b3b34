"""The learning-rate scheduler that the script holds: it moves when the optimizer has moved."""

from collections.abc import Sequence
from typing import Any

from drivetrain.facade.optimizer import PreparedOptimizer
from drivetrain.runtime.gradient_state import GradientState


class PreparedScheduler:
    """Wraps a scheduler so that one step of it means one step of its optimizers.

    Args:
        scheduler: the user's scheduler.
        optimizers: the prepared optimizers it drives.
        state: the accumulation window.
        step_with_optimizer: False steps on every call.
        steps_per_call: 1, or the number of data-parallel ranks for a schedule counted in samples.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        state: GradientState,
        *,
        step_with_optimizer: bool = True,
        steps_per_call: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._window = state
        self._step_with_optimizer = step_with_optimizer
        self._steps_per_call = steps_per_call

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule if the optimizers stepped since; inside a window do nothing."""
        if not self._step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._window.sync_gradients:
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self._steps_per_call):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch < total - 1:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group after the last step."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group as the scheduler computes it."""
        return list(self.scheduler.get_lr())

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print the learning rate as the wrapped scheduler does."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped scheduler."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_window": GradientState(1)}  # a copy is on its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        # Only called for names not found above: last_epoch, base_lrs, a scheduler's own methods.
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
