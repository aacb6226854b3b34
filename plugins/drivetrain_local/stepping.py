"""The steps of workers: which of them all workers take together, and how many were taken."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

from drivetrain.collectives import connect
from drivetrain.runtime.mesh import Axis
from drivetrain.shards import HeldPart
from drivetrain.strategy import Run
from drivetrain_local.line import WorkerLine
from drivetrain_local.options import LocalOptions
from drivetrain_local.outer import OuterSteps, StepCount
from drivetrain_local.warm_up import WarmUp
from drivetrain_local.worker import Worker

_COUNT = "local_steps_"


class Stepping(Worker):
    """The methods of a worker that are about steps: its connections, its warm-up, its counts."""

    def __init__(self, config: LocalOptions, run: Run) -> None:
        super().__init__(config, run)
        self._closing = ExitStack()  # in the opposite order: hooks go before what they call
        self._outer: list[OuterSteps] = []
        self._parts: dict[str, HeldPart] = {}  # of every parameter of the model
        self._fragments: dict[str, int] = {}
        self._closing.callback(self._inner.close)
        self._ranks = connect(self._everyone, run.traffic, run.world.device, run.world.timeout)
        self._closing.callback(self._ranks.close)
        self._line = WorkerLine(config, run, self._near, self._far, self._ranks)
        self._closing.callback(self._line.close)
        self._workers = self._line.everyone
        self._counts: list[StepCount] = []
        self._warm_up = WarmUp(self._inner, self._workers, self._outer)
        self._closing.callback(self._warm_up.close)

    @property
    def missed(self) -> int:
        """How many exchanges were without this worker, because it came late."""
        return sum(late.missed for outer in self._outer for late in outer.late)

    @property
    def steps_apart(self) -> bool:
        """Whether there is more than one worker, and the warm-up is over."""
        return not self._alone and not self._all_warm_up

    @property
    def _all_warm_up(self) -> bool:
        return bool(self._outer) and all(outer.warms_up for outer in self._outer)

    @property
    def steps_with(self) -> Axis | None:
        """The ranks of the worker, where the workers do not wait for late ones."""
        return None if self._all_warm_up else self.will_step_with

    @property
    def will_step_with(self) -> Axis | None:
        """The ranks of the worker, where late ones are left out after the warm-up."""
        return self._near if self.config.late_s and not self._alone else None

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless accumulating, return with gradients averaged over the worker.

        In the warm-up, they are averaged over all workers.
        """
        self._warm_up.backward(loss, **options)

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Context in which backward keeps gradients local to the rank."""
        return self._warm_up.accumulating(enabled)

    def close(self) -> None:
        """Take the hooks off; the model keeps the worker's own weights."""
        self._closing.close()

    def progress(self) -> Mapping[str, int]:
        """Return the steps of each optimizer, beside the counts of the strategy inside."""
        counts = {f"{_COUNT}{index}": count.steps for index, count in enumerate(self._counts)}
        return {**self._inner.progress(), **counts}

    def resume(self, progress: Mapping[str, int]) -> None:
        """Go on counting where a saved run was."""
        self._inner.resume(progress)
        for index, count in enumerate(self._counts):
            count.resume(progress.get(f"{_COUNT}{index}", 0))
