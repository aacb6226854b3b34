"""The strategy ``local``: workers train apart, and step outer weights together (DiLoCo, 2023).

A worker is the ranks that train together, by a strategy of their own: ``Worker`` hands everything
to that strategy that ``Local`` does not do itself.

The cost of local steps, and a simulated step: the strategy inside, and a round's exchange.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.collectives import Route, connect
from drivetrain.collectives.volume import FlatSlice, ParameterRow, Sent
from drivetrain.compression.compressor import Compressor, Fidelity
from drivetrain.cost import HOST, Cost, ModelSpec
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.model.modules import (
    clean_name,
    held_buffers,
    held_parameters,
    named_parameters,
)
from drivetrain.parallel.optimizers import outermost
from drivetrain.parallel.options import OffloadOptions
from drivetrain.parallel.replicated import replicate
from drivetrain.runtime.mesh import Axis, HostLevels
from drivetrain.runtime.world import World
from drivetrain.saved_state import StateAround, TrainingState, left_inside
from drivetrain.shards import HeldPart, Reader, Shard
from drivetrain.simulator.step import (
    COMPUTE,
    Collective,
    Operation,
    SimulatedRun,
    SimulatedStep,
    SimulatedTask,
    SimulatedUnit,
)
from drivetrain.strategy import (
    Form,
    Joinable,
    Pace,
    Planning,
    Prepared,
    Run,
    Strategy,
    StrategyAround,
    find_strategy,
)
from drivetrain_local.options import AXIS, LocalOptions, LocalOutline
from drivetrain_local.outer import Messages, OuterSteps, StepCount, WarmUp, fragment_of_each, wide
from drivetrain_local.state import (
    WorkerReader,
    go_on_with_kept,
    joined_weights,
    marked,
    named_by_any,
    noting_weights,
    optimizers_apart,
    saved_workers,
    shards_of_worker,
)
from drivetrain_local.sync import WorkerLine, links_of_workers, run_inside, told_numbers


def strategy_inside(config: LocalOptions) -> tuple[type[Strategy[Any]], Any]:
    """Return the class of the strategy inside of a worker, and its options.

    Raises:
        ConfigError: as ``outline_inside``.
    """
    config.outline_inside()
    return find_strategy(config.inner.name, config.inner.options)


# --- the cost of local steps, and a simulated step ---


def estimate(config: LocalOptions, model: ModelSpec, run: Run) -> Cost:
    """Return the bytes that a rank holds, and the bytes that rank 0 sends per step of a round."""
    near, far = config.planned(run.mesh, run.world)
    kind, options = strategy_inside(config)
    inside = run_inside(run, near)
    cost = kind.cost(options, model, inside)
    if far.size == 1:
        return cost
    here = kind.planning().local_model(options, model, inside)
    parts = _state(kind, options, model, inside)
    part = sum(parts.values())
    route = Route(far)
    if run.links.in_channels:
        route = Route(far, HostLevels(near.alone, far), links_of_workers(run))
    stepped = kind.planning().stepped(options, model, inside)
    in_round, kept = _exchanges(config, model, here, stepped, route)
    in_round += route.broadcast(sum(spec.nbytes for spec in here.buffers))
    if config.late_s:
        in_round += _agreement(config, near, far)
    sent = {key: -(-count // config.every) for key, count in in_round.items()}
    under_way = round(part * config.under_way)
    outer = Counter({place: STATES * nbytes for place, nbytes in parts.items()})
    outer["outer"] += under_way + kept
    return Cost(
        held={**cost.held, **outer},
        sent=dict(Sent(cost.sent) + Sent(sent)),
        uncounted=cost.uncounted,
    )


def _state(
    kind: type[Strategy[Any]], options: Any, model: ModelSpec, inside: Run
) -> dict[str, int]:
    """Return the bytes of the tensors that this rank's optimizers hold, by place of outer state.

    A state of an optimizer is as large as these tensors. Outer state is in host memory where stores
    keep the optimizer's state, on a disk, too.
    """
    one, none = (
        kind.cost(options, replace(model, states=states, inputs=None), inside).held
        for states in (1, 0)
    )
    parts: Counter[str] = Counter()
    for name, nbytes in one.items():
        stored = name != "optimizer" and inside.world.device.type != "cpu"
        parts[f"outer{HOST}" if stored else "outer"] += nbytes - none.get(name, 0)
    return {place: nbytes for place, nbytes in parts.items() if nbytes}


def _agreement(config: LocalOptions, near: Axis, far: Axis) -> Sent:
    """Return the bytes by which the ranks of a worker learn who takes part, in a round."""
    told = Route(near).broadcast(told_numbers(far.size) * torch.int64.itemsize)
    return Sent({key: count * config.fragments for key, count in told.items()})


def _exchanges(
    config: LocalOptions,
    model: ModelSpec,
    here: ModelSpec,
    stepped: Mapping[str, tuple[int, int]],
    route: Route,
) -> tuple[Sent, int]:
    """Return the bytes that a rank sends in a round, and keeps back.

    Args:
        config: the options.
        model: the whole one.
        here: the part of it that this rank's modules have.
        stepped: the ranges that its optimizers step, by name.
        route: between workers.
    """
    shapes = {spec.name: spec.shape for spec in model.parameters}
    fragments = fragment_of_each(model.module, shapes, config.fragments)
    groups: dict[tuple[int, torch.dtype, bool], list[FlatSlice]] = {}
    for spec in (each for each in here.parameters if each.name in stepped):
        row = ParameterRow(spec.name, spec.shape, spec.outer_dim, 0)
        piece = FlatSlice.of(spec.numel, wide(spec.dtype), [row]).cut(*stepped[spec.name])
        message = fragments[spec.name], spec.dtype, spec.shape == shapes[spec.name]
        groups.setdefault(message, []).append(piece)
    sent, kept = Sent(), 0
    for pieces in groups.values():
        flat_slice = FlatSlice.joined(pieces, pieces[0].dtype)
        sent += route.gradients_summed(flat_slice)
        kept += route.kept_back(flat_slice)
    return sent, kept


# --- a simulated step: the step inside of a worker, and 1/H of an exchange ---


_FAR = f"{AXIS}.far"

STATES = 2
"""Outer weights and momentum."""

_BESIDE = 2
"""Outer gradients of a fragment in one tensor when its exchange starts, and of one parameter by
itself, which may be as large."""

_BYTES = 4
"""Outer weights, their momentum and outer gradients are of the optimizer's tensors, in fp32."""


class LocalPlanning(Planning):
    """Plans of rounds of local steps; a search proposes none: it takes exact strategies alone."""

    def crosses_links(self, config: LocalOptions, world: World) -> bool:
        """Return whether there are several workers: on one host, too, if each rank is one."""
        return world.spans_hosts or (config.workers == "ranks" and world.size > 1)

    def variants(self, world_size: int) -> Sequence[Mapping[str, Any]]:
        """Return none: a trajectory of its own equals no other."""
        return ()

    def candidates(self, world: World) -> Sequence[Form]:
        """Return the form for hosts that a network connects."""
        return [Form({}, exact=False)] if world.spans_hosts else []

    def stages(self, config: LocalOptions) -> Sequence[str]:
        """Return the axes of a pipeline inside of workers."""
        kind, options = strategy_inside(config)
        return kind.planning().stages(options)

    def draws_masks(self, config: LocalOptions) -> bool:
        """Ask the strategy inside."""
        kind, options = strategy_inside(config)
        return kind.planning().draws_masks(options)

    def advises_against(self, config: LocalOptions, method: Compressor[Any]) -> bool:
        """Return whether a method's errors and the outer momentum make each other grow."""
        return method.sparse and config.outer_momentum > 0

    def layouts(
        self, blocks: int, heads: int, ranks: int, per_host: int
    ) -> Iterable[Mapping[str, Any]]:
        """Return none."""
        return ()

    def simulate(
        self, config: LocalOptions, units: Sequence[SimulatedUnit], run: SimulatedRun
    ) -> SimulatedStep:
        """Return the mean step of a round, of the ranks of one replica.

        Args:
            config: the options.
            units: in the order of forward.
            run: its ranks fill hosts of ``per_host`` ranks.
        """
        ranks = run.axes.get(AXIS, 1)
        worker = run.together(AXIS) if config.workers == "hosts" and AXIS in run.axes else 1
        workers = -(-ranks // worker)
        kind, options = strategy_inside(config)
        alone = replace(run, axes={**run.axes, AXIS: worker}, far=None)
        inside = kind.planning().simulate(options, units, alone)
        if workers == 1:
            return inside
        exchanges, held, stored = [], [], [dict(each) for each in inside.stored]
        whole = inside
        if beside := config.stored_inside():
            options = replace(options, offload=OffloadOptions())
            whole = kind.planning().simulate(options, units, alone)
        # A rank exchanges the elements of which it keeps the optimizer's state, in stores, too.
        for stage, (kinds, there) in enumerate(zip(inside.held, whole.held, strict=True)):
            nbytes = there.get("optimizer", 0.0) / run.bytes.optimizer * _BYTES
            # Without a delay the step waits for the exchange; with one the exchange is beside it.
            lane = _FAR if config.delay else COMPUTE
            operations = _exchange(nbytes / config.every, workers, run)
            exchange = SimulatedTask("outer step", operations, lane, stage=stage)
            exchange.during = _BESIDE * nbytes / config.fragments
            exchanges.append(exchange)
            kept = STATES * nbytes
            held.append({**kinds, "outer": (1 - beside) * kept + config.under_way * nbytes})
            if beside:
                stored[stage]["host"] += beside * kept
            if run.far:
                held[-1]["errors of links"] = run.far.held * nbytes
        axes = {**inside.axes, AXIS: worker, _FAR: workers}
        return SimulatedStep([*inside.tasks, *exchanges], held, axes, stored)


def _exchange(nbytes: float, workers: int, run: SimulatedRun) -> tuple[Operation, ...]:
    """Return the operations by which a rank gets the sum over workers of so many bytes."""
    if run.far is None:
        return (Collective(_FAR, "all_reduce", nbytes),)
    ((_, operations),) = run.far.messages(AXIS, nbytes, 1, workers, divided=False)
    return operations


# --- the state of a worker ---

_COUNT = "local_steps_"


class LocalState(StateAround):
    """The state of a worker, and the outer weights, which are those that others read.

    Args:
        local: the strategy, once the strategy inside is prepared.
    """

    def __init__(self, local: "Local") -> None:
        super().__init__(local._inner.state)
        self._local = local
        self._model, self._parts, self._alone = local._model, local._parts, local._alone
        self._ranks, self._workers, self._far = local._ranks, local._workers, local._far
        self._outer, self._counts = local._outer, local._counts

    dtensors = left_inside(TrainingState.dtensors)

    def progress(self) -> Mapping[str, int]:
        """Return the steps of each optimizer, beside the counts of the strategy inside."""
        counts = {f"{_COUNT}{index}": count.steps for index, count in enumerate(self._counts)}
        return {**super().progress(), **counts}

    def resume(self, progress: Mapping[str, int]) -> None:
        """Go on counting where a saved run was."""
        super().resume(progress)
        for index, count in enumerate(self._counts):
            count.resume(progress.get(f"{_COUNT}{index}", 0))

    # --- whole weights: the outer ones ---

    @contextmanager
    def whole(self, module: nn.Module, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """Context with whole tensors on every rank: outer weights, alike for all workers."""
        outer = self._outer_weights(module, names)
        with self.inner.whole(module, [n for n in names if n not in outer]) as state:
            found = {**state, **outer}
            yield {name: found[name] for name in names}

    def _outer_weights(self, module: nn.Module, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return whole outer weights by name; parameters without any are left out."""
        if self._alone:
            return {}
        facts, device = self.inner.facts(module), self._local.run.world.device
        with self._outer_shown():
            shards, held = self.inner.shards(), self._optimizer_of_each()
            return joined_weights(self._ranks, device, facts, names, shards, held)

    def _optimizer_of_each(self) -> dict[str, int]:
        """Return the optimizer of each parameter that has outer weights on this rank, by name."""
        found = {}
        for index, outer in enumerate(self._outer):
            names = outer.messages.names()
            found.update({names[id(p)]: index for p in outer.state if id(p) in names})
        return found

    @contextmanager
    def _outer_shown(self) -> Iterator[None]:
        """Context in which the strategy inside saves the outer state with the optimizers'."""
        for outer in self._outer:
            outer.shown()
        try:
            yield
        finally:
            for outer in self._outer:
                outer.hidden()

    @contextmanager
    def gathered(
        self, parameters: Iterable[nn.Parameter], *, modify: bool = True
    ) -> Iterator[None]:
        """Keep the worker's own parameters whole; rank 0's changes become every worker's."""
        chosen = list(parameters)
        known = {id(p) for _, p in self._model.named_parameters()}
        if any(id(p) not in known for p in chosen):
            raise UsageError(
                "expected parameters of the prepared model, found some that it does not have on "
                "this rank; take them from the model after prepare()"
            )
        changed: frozenset[str] = frozenset()
        with self.inner.gathered(chosen, modify=modify):
            watched = modify and not self._alone
            before = [p.detach().clone() for p in chosen] if watched else []
            yield
            if watched:
                changed = self._adopt_changes(chosen, before)
        for outer in self._outer if changed else ():
            outer.restart(changed)

    def _adopt_changes(
        self, parameters: Sequence[nn.Parameter], before: Sequence[Tensor]
    ) -> frozenset[str]:
        """Send the first worker's changes around; return the names of changed parameters."""
        names = {id(p): clean_name(name) for name, p in self._model.named_parameters()}
        pairs = zip(parameters, before, strict=True)
        mine = {names[id(p)] for p, old in pairs if not torch.equal(p, old)}
        # About the whole model: ranks may hold other parameters.
        names_of_all, device = list(self._parts), self._local.run.world.device
        for line in (self._workers, self._ranks):
            mine = {*named_by_any(line, device, names_of_all, mine, "changes of weights")}
        changed = frozenset(mine)
        here = [p for p in parameters if names[id(p)] in changed]
        replicate(here, self._workers, "changes of weights")
        return changed

    # --- checkpoints ---

    def shards(self) -> Iterator[Shard]:
        """Yield this worker's state; ``drivetrain_local.state`` gives the keys."""
        if self._alone:
            yield from self.inner.shards()
            return
        saved: set[str] = set()
        with self._outer_shown():
            inside = noting_weights(self.inner.shards(), saved)
            outer = self._optimizer_of_each()
            yield from shards_of_worker(inside, outer, self._far.rank, self._parts)
        # Other ranks that step the same part keep the same errors: who saves the part saves both.
        mine = {name: word for name, word in self._held_parts().items() if name in saved}
        yield from marked(self._workers.kept(), mine)

    def _held_parts(self) -> dict[str, str]:
        """Return, by parameter, the word of the part of which optimizers hold elements."""
        return {name: word for outer in self._outer for name, word in outer.messages.held_parts()}

    def check(self, reader: Reader) -> None:
        """Compare names and shapes."""
        self.inner.check(self._view(reader))

    def load(self, reader: Reader) -> None:
        """Load this worker's state; with another number of workers, the mean of all saved ones."""
        self.inner.load(self._view(reader))
        apart = optimizers_apart(reader)
        for index, outer in enumerate(self._outer):
            outer.taken_over(apart=index in apart)
        method = self._local.run.links.name_for("gradients")
        parts, device = self._held_parts(), self._local.run.world.device
        go_on_with_kept(self._workers, self._ranks, device, reader, parts, method)

    def _view(self, reader: Reader) -> Reader:
        saved = saved_workers(reader)
        worker = self._far.rank if saved == self._far.size else None
        return WorkerReader(reader, saved, worker, outer=not self._alone) if saved else reader


# --- the strategy ``local`` ---

# Douillard et al. 2023, algorithm 1. What happens in a step is told by ``drivetrain_local.outer``;
# here the outer steps are put around the optimizers, and the outer weights are what others read.


logger = get_logger(__name__)


class Local(LocalOutline, StrategyAround[LocalOptions]):
    """Local steps over hosts; one object per prepared model.

    ``prepare`` returns what the strategy inside returns: outer steps happen in hooks of optimizers.
    With one worker there is nobody to exchange with, and the strategy inside does everything.
    """

    def __init__(self, config: LocalOptions, run: Run) -> None:
        self._near, self._far = config.started(run.mesh, run.world)
        self._everyone = run.mesh.start_around(AXIS, self._near, run.world)
        self._alone = self._far.size == 1
        kind, options = strategy_inside(config)
        super().__init__(config, run, kind(options, run_inside(run, self._near)))
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

    @classmethod
    def cost(cls, config: LocalOptions, model: ModelSpec, run: Run) -> Cost:
        """Return the bytes of the strategy inside, and those of a round over its steps."""
        return estimate(config, model, run)

    @classmethod
    def planning(cls) -> Planning:
        """Return the plan of the mean step of a round."""
        return LocalPlanning(cls)

    # --- which steps all workers take together, and how many were taken ---

    @property
    def missed(self) -> int:
        """How many exchanges were without this worker, because it came late."""
        return sum(late.missed for outer in self._outer for late in outer.late)

    @property
    def _all_warm_up(self) -> bool:
        return bool(self._outer) and all(outer.warms_up for outer in self._outer)

    @property
    def pace(self) -> Pace:
        """Workers step by themselves once the warm-up is over, and may leave late ones out then."""
        later = self._near if self.config.late_s and not self._alone else None
        pace = self._inner.pace._replace(waits=self._warm_up.waits, later=later, states=self._near)
        return pace if self._all_warm_up else pace._replace(apart=not self._alone, ranks=later)

    @property
    def joinable(self) -> Joinable | None:
        """Ranks of the only worker may stand in; several workers count steps, and cannot."""
        return self._inner.joinable if self._alone else None

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

    # --- taking over ---

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Let workers start from the first one's weights, and step outer weights with theirs."""
        self._announce()
        self._model = model
        if self._alone:
            prepared = self._counted(self._inner.prepare(model, optimizers))
            self._show()
            return prepared
        tensors = [*held_parameters(model), *model.buffers()]
        replicate([t for t in tensors if not t.is_meta], self._workers, "replicate model")
        # The model is whole for the last time: the strategy inside may leave a rank parts of it.
        parameters = named_parameters(model)
        self._parts.update((name, HeldPart(tuple(p.shape))) for name, p in parameters.items())
        self._fragments = fragment_of_each(model, parameters, self.config.fragments)
        prepared = self._around(optimizers, lambda: self._inner.prepare(model, optimizers))
        self._show()
        # A pipeline runs several backwards in one: only the end of all of them averages.
        pipelined = any(
            self.run.mesh[name].size > 1 for name in self.planning().stages(self.config)
        )
        if self.config.warmup_steps and not pipelined:
            self._warm_up.follow(model)
        return prepared

    def _show(self) -> None:
        self.pipeline, self.gradients = self._inner.pipeline, self._inner.gradients
        self.state = LocalState(self)

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Step outer weights with one more optimizer."""
        if self._alone:
            alone = Prepared(self._model, (self._inner.bind(optimizer),))
            return self._counted(alone).optimizers[0]
        bound: list[Optimizer] = []

        def bind() -> Prepared:
            bound.append(self._inner.bind(optimizer))
            return Prepared(self._model, tuple(bound))

        return self._around([optimizer], bind).optimizers[0]

    def _counted(self, prepared: Prepared) -> Prepared:
        """Count the steps of the only worker: others that come later go on from there."""
        for optimizer in prepared.optimizers:
            self._counts.append(count := StepCount())
            handle = optimizer.register_step_post_hook(outermost(count.after_step))
            self._closing.callback(handle.remove)
        return prepared

    def _around(self, optimizers: Sequence[Optimizer], take: Callable[[], Prepared]) -> Prepared:
        """Put outer steps around optimizers that the strategy inside takes."""
        first = len(self._outer)
        made = [
            OuterSteps(self.config, self._messages(each), self._line.late(index))
            for index, each in enumerate(optimizers, first)
        ]
        # Before a step a store inside has not begun; behind it values have not been sent around.
        for outer in made:
            before = outer.optimizer.register_step_pre_hook(outermost(outer.before_all))
            after = outer.optimizer.register_step_post_hook(outermost(outer.after_step))
            for handle in (before, after):
                self._closing.callback(handle.remove)
        prepared = take()
        self._parts.update(self._inner.state.parts())
        for outer in made:
            last = outer.optimizer.register_step_pre_hook(outermost(outer.before_step))
            self._closing.callback(last.remove)
        if any(a is not b for a, b in zip(optimizers, prepared.optimizers, strict=True)):
            raise UsageError(
                f"expected a strategy inside of local that keeps the script's optimizers, found "
                f"{type(self._inner).__name__}, which puts others in their place; name another "
                "one as strategy.inner"
            )
        if made and not self._outer:
            made[0].buffers = list(held_buffers(self._model).values())
        self._outer += made
        self._counts += made
        return prepared

    def _messages(self, optimizer: Optimizer) -> Messages:
        return Messages(
            optimizer, self._model, self._inner, self._workers, self._parts, self._fragments
        )

    def _announce(self) -> None:
        kind, size = type(self._inner).__name__, self._everyone.size
        if self._alone:
            whole = self._near.size == size  # each rank has a replica, and could be a worker
            advice = "; with workers: ranks each rank is a worker" if whole else ""
            logger.announce(
                f"local: one worker of {size} ranks trains as {kind}: there is no other one to "
                f"exchange with{advice}"
            )
            return
        warm_up = self.config.warmup_steps
        first = f"average gradients for {warm_up} steps, then " if warm_up else ""
        logger.announce(
            f"local: {self._far.size} workers of {size} ranks, {kind} inside, {first}exchange "
            f"{self.config.fragments} fragments every {self.config.every} steps; a trajectory of "
            f"its own ({Fidelity.EMPIRICAL}){self.run.links.note(self.channels(self.config))}"
        )
        method = self.run.links.gradients
        if method is not None and self.planning().advises_against(self.config, method):
            _warn_of_divergence(self.run.links.name_for("gradients"), self.config.outer_momentum)


def _warn_of_divergence(method: str, momentum: float) -> None:
    logger.warning(
        f"local: {method} sends few numbers in an exchange, and keeps all others for later ones; "
        f"with outer_momentum: {momentum} training may diverge. Take int4, or outer_momentum: 0 "
        "and outer_lr: 1"
    )
