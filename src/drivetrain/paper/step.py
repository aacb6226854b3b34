"""A step on paper: tasks with their lanes, their order, and the memory they take and free.

A strategy draws the graph once. The bytes held and sent follow from it, and, with a description of
the hardware, the time, the peak of memory and the picture (``drivetrain.paper.lanes``).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.paper.work import Collective, Operation, TierCopy

COMPUTE = "compute"
"""The lane of kernels; every axis has a lane of its own, named like the axis."""

LENT, ARRIVALS = "lent", "receive buffers"
"""Kinds of held bytes that all units use in turn: buffers of gradients and of messages."""


@dataclass(slots=True)
class PaperTask:
    """A piece of a rank's work, or a collective beside it.

    Attributes:
        name: for pictures.
        operations: run one after the other; a collective among the operations of the lane
            ``compute`` makes the rank wait.
        lane: ``compute``, or the axis over which a collective runs beside compute. The tasks of a
            lane run in the order of the step.
        after: indices of tasks of the step that must have ended.
        stage: which of the ranks that a step describes runs it: its pipeline stage.
        takes: bytes of memory from the start of the task on.
        frees: bytes given back when it ends.
        during: bytes that exist only while it runs.
        repeat: how often the operations run.
        phase: ``forward``, ``backward``, or nothing for work of the whole step.
        micro_batch: which one the phase is about.
    """

    name: str
    operations: tuple[Operation, ...] = ()
    lane: str = COMPUTE
    after: tuple[int, ...] = ()
    stage: int = 0
    takes: float = 0.0
    frees: float = 0.0
    during: float = 0.0
    repeat: int = 1
    phase: str = ""
    micro_batch: int = 0


@dataclass(slots=True)
class PaperStep:
    """One optimizer step of the ranks of one data-parallel replica.

    Attributes:
        tasks: in an order in which every task comes after those it waits for, or at least so in
            each lane.
        held: bytes between steps by stage and kind.
        axes: the number of ranks of each axis.
        stored: bytes between steps in host memory and on a disk, by stage.
    """

    tasks: list[PaperTask]
    held: Sequence[Mapping[str, float]]
    axes: Mapping[str, int] = field(default_factory=dict)
    stored: Sequence[Mapping[str, float]] = ()

    def sent(self) -> Sequence[Mapping[tuple[str, str], float]]:
        """Return the bytes that a rank of each stage sends, by axis or link, and operation."""
        stages: list[Counter[tuple[str, str]]] = [Counter() for _ in self.held]
        for task in self.tasks:
            for operation in task.operations:
                if isinstance(operation, Collective):
                    ranks = self.axes.get(operation.axis, 1)
                    key = (operation.axis, operation.operation)
                    stages[task.stage][key] += operation.sent(ranks) * task.repeat  # type: ignore[assignment]
                elif isinstance(operation, TierCopy):
                    key = (operation.link, task.lane)
                    stages[task.stage][key] += operation.nbytes * task.repeat  # type: ignore[assignment]
        return stages
