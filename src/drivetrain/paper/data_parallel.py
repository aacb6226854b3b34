"""Draws the step of data parallelism: the divided state decides about the messages.

Volumes follow Rajbhandari et al. 2020 (arXiv 1910.02054), section 7.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import COMPUTE, PaperStep, PaperTask
from drivetrain.paper.work import Collective, MemoryPass, PaperUnit

AXIS = "dp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How the ranks of the data-parallel axis share the state of a model.

    Attributes:
        optimizer: whether optimizer state is divided.
        gradients: whether gradients are divided: they are then reduced after every micro-batch.
        parameters: whether parameters are divided, and gathered unit by unit.
        keeps: whether gathered parameters stay whole from forward to backward.
        group: how many neighbors divide the state; 0 for all ranks of the axis.
    """

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    keeps: bool = False
    group: int = 0


def data_parallel_step(
    units: Sequence[PaperUnit], run: PaperRun, sharing: Sharing | None = None
) -> PaperStep:
    """Return the step of one rank that trains units on its share of the batch.

    Args:
        units: in the order of forward.
        run: see there.
        sharing: what is divided; nothing by default.
    """
    return _Drawing(units, run, sharing or Sharing()).step()


@dataclass
class _Drawing:
    units: Sequence[PaperUnit]
    run: PaperRun
    sharing: Sharing
    tasks: list[PaperTask] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = self.run.axes.get(AXIS, 1)
        self.group = min(self.sharing.group or self.ranks, self.ranks)
        self.near = AXIS if self.group == self.ranks else f"{AXIS}.near"

    def step(self) -> PaperStep:
        m = self.run.micro_batches
        arriving = self._gather_stepped()
        for index in range(m):
            self._forward(index, arriving if index == 0 else {})
            self._backward(index)
        self._update()
        axes = {
            **self.run.axes,
            f"{AXIS}.near": self.group,
            f"{AXIS}.far": self.ranks // self.group,
        }
        return PaperStep(self.tasks, [self._held()], axes)

    # --- the phases of a step ---

    def _gather_stepped(self) -> dict[int, int]:
        """Gather updated parameters, unit by unit; the first forward waits for each unit."""
        divided = self.sharing.optimizer and not self.sharing.parameters and self.group > 1
        if not divided:
            return {}
        return {
            index: self._add(self._gathering(unit, "", 0, []))
            for index, unit in enumerate(self.units)
            if unit.elements
        }

    def _forward(self, index: int, arriving: dict[int, int]) -> None:
        for at, count, unit in self._runs(alone=bool(arriving) or self._gathers):
            after = [arriving[at]] if at in arriving else []
            if self._gathers:
                after.append(self._bring(unit, "forward", index))
            task = PaperTask(unit.name, unit.forward, after=tuple(after), phase="forward")
            task.micro_batch, task.repeat = index, count
            task.takes, task.during = count * unit.kept, self._whole(unit)
            self._add(task)

    def _backward(self, index: int) -> None:
        last = index == self.run.micro_batches - 1
        reduces = self.ranks > 1 and (self.sharing.gradients or last)
        for _, count, unit in reversed(list(self._runs(alone=reduces or self._gathers))):
            after = []
            if self._gathers and not self.sharing.keeps:
                after.append(self._bring(unit, "backward", index))
            task = PaperTask(unit.name, unit.computed_backward, after=tuple(after))
            task.phase, task.micro_batch, task.repeat = "backward", index, count
            task.frees = count * unit.kept
            task.during = unit.transient + unit.largest + self._whole(unit)
            computed = self._add(task)
            if reduces and unit.elements:
                self._reduce(unit, computed, index, last=last)

    def _reduce(self, unit: PaperUnit, computed: int, index: int, *, last: bool) -> None:
        nbytes = unit.elements * self.run.bytes.gradient
        operation = "reduce_scatter" if self.sharing.optimizer else "all_reduce"
        messages = []
        if self.group > 1:
            messages.append(Collective(self.near, operation, nbytes))
        if self.group < self.ranks and last:
            messages.append(Collective(f"{AXIS}.far", "all_reduce", nbytes / self.group))
        after = computed
        for message in messages:
            task = PaperTask(f"reduce {unit.name}", (message,), message.axis, (after,))
            task.phase, task.micro_batch = "backward", index
            after = self._add(task)

    def _update(self) -> None:
        reduced = [index for index, task in enumerate(self.tasks) if task.lane != COMPUTE]
        elements = self._elements / (self.group if self.sharing.optimizer else 1)
        update = MemoryPass(elements * self.run.bytes.update, 0)
        # The norm of the gradients is a sum over all of them.
        self._add(PaperTask("update", (update,), after=tuple(reduced[-len(self.units) :])))

    # --- pieces ---

    @property
    def _gathers(self) -> bool:
        return self.sharing.parameters and self.group > 1

    @property
    def _elements(self) -> int:
        return sum(unit.elements for unit in self.units)

    def _bring(self, unit: PaperUnit, phase: str, index: int) -> int:
        """Gather a unit beside the unit before it, not earlier: its memory is limited."""
        before = self.computed[-2:-1]
        return self._add(self._gathering(unit, phase, index, before))

    def _gathering(
        self, unit: PaperUnit, phase: str, index: int, after: Sequence[int]
    ) -> PaperTask:
        message = Collective(self.near, "all_gather", unit.elements * self.run.bytes.parameter)
        task = PaperTask(f"gather {unit.name}", (message,), self.near, tuple(after), phase=phase)
        task.micro_batch = index
        return task

    def _whole(self, unit: PaperUnit) -> float:
        """Return the bytes of two whole units: the computing unit and the unit on its way."""
        return 2.0 * unit.elements * self.run.bytes.parameter if self._gathers else 0.0

    def _runs(self, *, alone: bool) -> Iterator[tuple[int, int, PaperUnit]]:
        """Yield (index, count, unit): equal neighbors together, unless each is on its own."""
        if alone:
            yield from ((index, 1, unit) for index, unit in enumerate(self.units))
            return
        index = 0
        for _, equal in groupby(self.units, key=id):
            same = list(equal)
            yield index, len(same), same[0]
            index += len(same)

    def _held(self) -> dict[str, float]:
        each, elements = self.run.bytes, self._elements
        sharing, group = self.sharing, self.group
        return {
            "parameters": elements * each.parameter / (group if sharing.parameters else 1),
            "gradients": elements * each.gradient / (group if sharing.gradients else 1),
            "optimizer": elements * each.optimizer / (group if sharing.optimizer else 1),
        }

    def _add(self, task: PaperTask) -> int:
        self.tasks.append(task)
        if task.lane == COMPUTE:
            self.computed.append(len(self.tasks) - 1)
        return len(self.tasks) - 1
