"""The simulated step of a cell: units divided over ``tp``, cut into stages, in a schedule's order.

Each stage's own step comes from the data-parallel strategy inside of the cell; the schedule only
puts the tasks of all stages into its order, with messages between stages. Paper: Narayanan et al.
2021 (arXiv 2104.04473), sections 2.2 and 2.3; with ``sequence_parallel`` Korthikanti et al. 2022
(arXiv 2205.05198), section 4.2.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError
from drivetrain.simulator.contract import StepBound, UnitCosts, stage_bound
from drivetrain.simulator.step import (
    COMPUTE,
    Boundary,
    Collective,
    Direction,
    MatrixProduct,
    MemoryPass,
    Operation,
    SimulatedRun,
    SimulatedStep,
    SimulatedTask,
    SimulatedUnit,
)
from drivetrain.strategy import Planning, Run
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.cost import part_of
from drivetrain_megatron.pipeline.schedules import (
    Action,
    ActionKind,
    Schedule,
    make_schedule,
    needs,
)
from drivetrain_megatron.state import data_parallel

# --- tensor parallelism ---


@lru_cache(maxsize=256)
def divided(unit: SimulatedUnit, ranks: int, by_tokens: bool) -> SimulatedUnit:
    """Return the share of a unit for each rank of ``tp``: work, messages, activations, parameters.

    Args:
        unit: of the whole model.
        ranks: of the axis.
        by_tokens: whether norms, dropouts and residuals are divided as well.

    Raises:
        ConfigError: heads of attention cannot be divided so.
    """
    if unit.heads % ranks:
        raise ConfigError(
            f"expected tp that divides the {unit.heads} heads of attention, found {ranks}; lower tp"
        )

    def share(direction: Direction) -> int:
        return ranks if direction == "features" or (direction == "tokens" and by_tokens) else 1

    return replace(
        unit,
        forward=_divide(unit.forward, ranks, by_tokens),
        back=_divide(unit.backward, ranks, by_tokens),
        saved=tuple(replace(each, nbytes=each.nbytes / share(each.divided)) for each in unit.saved),
        parameters=tuple(
            (-(-count // ranks) if cut else count, cut) for count, cut in unit.parameters
        ),
        sizes=tuple(-(-size // ranks) for size in unit.sizes),
        borrowed=-(-unit.borrowed // ranks),
        enters=unit.enters / (ranks if by_tokens else 1),
    )


def _divide(operations: Sequence[Operation], ranks: int, by_tokens: bool) -> tuple[Operation, ...]:
    found = (_operation(each, ranks, by_tokens) for each in operations)
    return tuple(each for each in found if each is not None)


def _operation(operation: Operation, ranks: int, by_tokens: bool) -> Operation | None:
    """Return one rank's part; where activations enter and nothing is divided, nothing is sent."""
    match operation:
        case MatrixProduct() if operation.divided:
            size = operation.divided
            return replace(operation, **{size: -(-getattr(operation, size) // ranks)})
        case MemoryPass():
            cut = operation.divided == "features" or (operation.divided == "tokens" and by_tokens)
            parts = ranks if cut else 1
            return replace(operation, nbytes=operation.nbytes / parts, back=operation.back / parts)
        case Boundary(enters=True):
            gathers = by_tokens and ranks > 1
            return Collective("tp", "all_gather", operation.nbytes) if gathers else None
        case Boundary():
            kind = "reduce_scatter" if by_tokens else "all_reduce"
            return Collective("tp", kind, operation.nbytes) if ranks > 1 else None
    return operation


# --- stages ---


def stages_of(config: MegatronConfig, units: Sequence[SimulatedUnit]) -> list[list[SimulatedUnit]]:
    """Return each rank's share of the units of each stage.

    Raises:
        ConfigError: options, heads or blocks do not fit together.
    """
    config.check()
    parts = [divided(unit, config.tp, config.sequence_parallel) for unit in units]
    return cut_into_stages(parts, config.pp * config.chunks)


def cut_into_stages(units: Sequence[SimulatedUnit], stages: int) -> list[list[SimulatedUnit]]:
    """Return consecutive units with as many blocks per stage as possible alike.

    The first stage also has what comes before the blocks, the last one what comes behind them;
    where blocks do not divide, stages in the middle have one more.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    blocks = [unit for unit in units if unit.repeated]
    if stages > len(blocks):
        raise ConfigError(
            f"expected at most as many stages as the model has blocks, {len(blocks)}, found "
            f"{stages}; lower pp or chunks"
        )
    first = next(index for index, unit in enumerate(units) if unit.repeated)
    each, rest = divmod(len(blocks), stages)
    start = (stages - rest) // 2
    found, at = [], 0
    for stage in range(stages):
        count = each + (start <= stage < start + rest)
        found.append(blocks[at : at + count])
        at += count
    found[0] = [*units[:first], *found[0]]
    found[-1] = [*found[-1], *units[first + len(blocks) :]]
    return found


# --- the pipeline ---


@dataclass
class PipelineStep:
    """Puts the steps of stages into the order of a schedule.

    Attributes:
        steps: of every stage of the schedule, each for all micro-batches.
        schedule: see there.
        message: the activation between two stages on one host.
        far: the same between two hosts.
        together: ranks of the pipeline on one host.
        tied: bytes of values, and of gradients, of the last stage's copies of parameters.
    """

    steps: Sequence[SimulatedStep]
    schedule: Schedule
    message: Collective
    far: Collective
    together: int
    tied: tuple[float, float] = (0.0, 0.0)

    def merged(self) -> SimulatedStep:
        """Return one step of all ranks of the pipeline."""
        self.tasks: list[SimulatedTask] = []
        self.places: list[dict[int, int]] = [{} for _ in self.steps]
        self.arrived: dict[Action, int] = {}
        self.ended: dict[Action, int] = {}
        self.groups = [_groups(step) for step in self.steps]
        ranks = self.schedule.ranks
        for stage in range(len(self.steps)):
            self._emit(stage, self.groups[stage]["", 0][0])
        waiting = [list(reversed(actions)) for actions in ranks]
        while any(waiting):
            for actions in waiting:
                while actions and self.ended.keys() >= {*needs(actions[-1], self.schedule.stages)}:
                    self._act(actions.pop())
        summed = self._between_ties("gradients", len(self.steps) - 1)
        for stage in range(len(self.steps)):
            before = [] if stage else summed
            self._emit(stage, self.groups[stage]["", 0][1], before)
        self._between_ties("values", 0)
        held = self._summed([step.held[0] for step in self.steps])
        stored = self._summed([kept for step in self.steps for kept in step.stored])
        return SimulatedStep(self.tasks, held, self.steps[0].axes, stored)

    def _between_ties(self, sent: str, source: int) -> list[int]:
        """Send gradients of copies to the first stage, or new values to the last one."""
        nbytes = self.tied[sent == "gradients"]
        here = source % len(self.schedule.ranks)
        if not nbytes or len(self.schedule.ranks) == 1:
            return []
        last = max(
            index
            for index, task in enumerate(self.tasks)
            if task.stage == here and task.lane == COMPUTE
        )
        message = (Collective("pp", "send", nbytes),)
        self.tasks.append(SimulatedTask(f"send {sent} of ties", message, "pp", (last,), here))
        return [len(self.tasks) - 1]

    def _summed(self, of_stages: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
        """Return the bytes of the ranks, each of which has one stage or several."""
        count = len(self.schedule.ranks)
        found = [defaultdict[str, float](float) for _ in range(count)]
        for stage, held in enumerate(of_stages):
            for kind, nbytes in held.items():
                found[stage % count][kind] += nbytes
        return list(found)

    def _act(self, action: Action) -> None:
        forward = action.kind is ActionKind.FORWARD
        phase = "forward" if forward else "backward"
        tasks = self.groups[action.stage][phase, action.micro_batch][0]
        before = [
            self.arrived.get(need, self.ended[need])
            for need in needs(action, self.schedule.stages)
            if need.stage != action.stage
        ]
        self.ended[action] = self._emit(action.stage, tasks, before, action.kind)
        self._send(action, forward)

    def _send(self, source: Action, forward: bool) -> None:
        """Send a stage's result to its neighbor, unless both are on the same rank."""
        neighbor = source.stage + (1 if forward else -1)
        count = len(self.schedule.ranks)
        if count == 1 or not 0 <= neighbor < self.schedule.stages:
            return
        if not forward and not source.kind.returns:
            return
        here, there = source.stage % count, neighbor % count
        crosses = here // self.together != there // self.together
        message = self.far if crosses else self.message
        self.arrived[source] = len(self.tasks)
        self.tasks.append(
            SimulatedTask(f"send {source}", (message,), "pp", (self.ended[source],), here)
        )

    def _emit(
        self,
        stage: int,
        indices: Sequence[int],
        before: Sequence[int] = (),
        kind: ActionKind | None = None,
    ) -> int:
        """Append tasks of a stage's own step; return the last task of its compute."""
        step, places = self.steps[stage], self.places[stage]
        last = -1
        for index in indices:
            task = step.tasks[index]
            part = _part(task, kind)
            if part is None:
                continue
            after = [places[each] for each in task.after if each in places]
            if task.lane == COMPUTE:
                after += before if last < 0 else []
            places[index] = len(self.tasks)
            if task.lane == COMPUTE:
                last = len(self.tasks)
            self.tasks.append(
                replace(part, stage=stage % len(self.schedule.ranks), after=tuple(after))
            )
        return last


def _part(task: SimulatedTask, kind: ActionKind | None) -> SimulatedTask | None:
    """Return the part of a task for an action; None where the other half runs the task."""
    if kind not in (ActionKind.INPUT, ActionKind.WEIGHT):
        return task
    weights = kind is ActionKind.WEIGHT
    if task.lane != COMPUTE:
        return task if weights else None
    chosen = tuple(
        each
        for each in task.operations
        if (isinstance(each, MatrixProduct) and each.for_weights) == weights
    )
    if weights:
        return replace(task, operations=chosen, during=0.0)
    return replace(task, operations=chosen, frees=0.0)


def _groups(step: SimulatedStep) -> dict[tuple[str, int], tuple[list[int], list[int]]]:
    """Return the tasks of each phase and micro-batch; those of none: before, and behind, all."""
    groups: dict[tuple[str, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    seen = False
    for index, task in enumerate(step.tasks):
        seen = seen or bool(task.phase)
        groups[task.phase, task.micro_batch][bool(seen and not task.phase)].append(index)
    return groups


def _keep_for_loss(step: SimulatedStep, head: SimulatedUnit) -> None:
    """Let a loss outside of the model keep its tensors until all backwards have ended.

    GPipe's schedule is the one for such a loss: the script gets a copy of the outputs, and the
    outputs' gradients wait for the backwards of all micro-batches.
    """
    waiting = 0.0
    for task in step.tasks:
        if task.phase == "backward" and task.name == head.name:
            waiting += task.frees + head.passing
            task.takes, task.frees = task.takes + head.passing, 0.0
    step.tasks[-1].frees += waiting


# --- what plans ask of ``megatron`` ---


CHUNKS = (2, 4, 8)
"""Stages per rank of the interleaved schedules that are tried."""


class CellPlanning(Planning):
    """Plans of a cell of ranks."""

    layout_keys: ClassVar[Mapping[str, str]] = {
        key: key for key in ("tp", "pp", "schedule", "chunks", "sequence_parallel")
    }
    inner_option: ClassVar[str] = "data_parallel"

    def variants(self, world_size: int) -> Sequence[Mapping[str, Any]]:
        """Return all ranks on the axis tp, and all on the axis pp."""
        return ({"tp": world_size}, {"pp": world_size})

    def stages(self, config: MegatronConfig) -> Sequence[str]:
        """Return the axis of the pipeline."""
        return ("pp",)

    def draws_masks(self, config: MegatronConfig) -> bool:
        """Return True: masks count elements, and do not depend on a generator."""
        return True

    def changes_links(self, config: MegatronConfig) -> bool:
        """Ask the data-parallel strategy; a pipeline mixes forwards and backwards."""
        kind, options = data_parallel(config)
        return config.pp == 1 and kind.planning().changes_links(options)

    def simulate(
        self, config: MegatronConfig, units: Sequence[SimulatedUnit], run: SimulatedRun
    ) -> SimulatedStep:
        """Draw the step of a cell; the strategy inside draws that of each stage.

        Raises:
            ConfigError: blocks, micro-batches or options do not fit together.
        """
        kind, options = data_parallel(config)
        stages = stages_of(config, units)
        schedule = make_schedule(config.schedule, config.pp, run.micro_batches, config.chunks)
        steps = [kind.planning().simulate(options, stage, run) for stage in stages]
        tied = (0.0, 0.0)
        if len(stages) > 1:  # the last one has copies of parameters tied to the first one's
            copies = sum(unit.borrowed for unit in stages[-1])
            tied = copies * run.bytes.parameter, copies * run.bytes.gradient
            steps[-1].held = [{**steps[-1].held[0], "tied copies": sum(tied)}]
        if config.pp > 1 and config.schedule == "gpipe":
            _keep_for_loss(steps[-1], stages[-1][-1])
        activation = max(unit.enters for stage in stages for unit in stage)
        near = Collective("pp", "send", activation)
        far = Collective("pp", "send", run.between_hosts(activation))
        return PipelineStep(steps, schedule, near, far, run.together("pp"), tied).merged()

    def lower_bound(
        self,
        config: MegatronConfig,
        units: Sequence[SimulatedUnit],
        run: SimulatedRun,
        costs: UnitCosts,
    ) -> StepBound:
        """Return a bound of a cell's step: the slowest stage, and the idle time.

        The first rank keeps the activations of p micro-batches; with v chunks, of
        p (1 + (p-1)/(p v)) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

        Raises:
            ConfigError: as ``step`` does.
        """
        kind, options = data_parallel(config)
        stages = stages_of(config, units)
        p, m = config.pp, run.micro_batches

        def draw(some: Sequence[SimulatedUnit], run: SimulatedRun) -> SimulatedStep:
            return kind.planning().simulate(options, some, run)

        found, key = [], (kind, repr(options))
        for rank in sorted({0, p - 1, p // 2}):
            mine = [unit for stage in stages[rank::p] for unit in stage]
            each = costs.of(mine, key, draw, run)
            extra = (p - 1) / p if config.chunks > 1 else 0.0
            kept = m if config.schedule == "gpipe" else min(m, p - rank + extra * p / config.chunks)
            found.append(
                (stage_bound(each, m, kept), sum(cost.compute * count for cost, count in each))
            )
        idle = (p - 1) / config.chunks * min(compute for _, compute in found)
        seconds = max(bound.seconds for bound, _ in found)
        seconds += idle if config.schedule != "zb-h1" else 0.0
        return StepBound(seconds, max(bound.nbytes for bound, _ in found))

    def local_model(self, config: MegatronConfig, model: ModelSpec, run: Run) -> ModelSpec:
        """Return this rank's part of each tensor of its stages."""
        return part_of(config, model, run)

    def stepped(
        self, config: MegatronConfig, model: ModelSpec, run: Run
    ) -> Mapping[str, tuple[int, int]]:
        """Return the elements that the data-parallel strategy steps, of this rank's parts."""
        kind, options = data_parallel(config)
        return kind.planning().stepped(options, part_of(config, model, run), run)

    def layouts(
        self, blocks: int, heads: int, ranks: int, per_host: int
    ) -> Iterator[Mapping[str, Any]]:
        """Yield every division: ``tp`` inside of a host, ``pp`` that divides the blocks.

        Tensor parallelism over a network loses by an order of magnitude (Narayanan et al. 2021,
        arXiv 2104.04473, section 5.4.1), so it is not tried there.

        Args:
            blocks: repeated blocks of the model.
            heads: heads of attention.
            ranks: of all hosts.
            per_host: ranks of a host.
        """
        for tp in divisors(ranks):
            if tp > per_host or heads % tp:
                continue
            for pp in divisors(ranks // tp):
                if pp > blocks or blocks % pp or tp * pp == 1:
                    continue
                for sequence in (False, True) if tp > 1 else (False,):
                    common = {"tp": tp, "pp": pp, "sequence_parallel": sequence}
                    yield {**common, "schedule": "1f1b", "chunks": 1}
                    for chunks in CHUNKS if pp > 1 else ():
                        if blocks % (pp * chunks) == 0:
                            yield {**common, "schedule": "interleaved", "chunks": chunks}


def divisors(count: int) -> list[int]:
    """Return the numbers that divide a count, ascending."""
    return [each for each in range(1, count + 1) if count % each == 0]
