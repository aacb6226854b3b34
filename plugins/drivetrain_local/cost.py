"""The cost of local steps, and a step on paper: the strategy inside, and a round's exchange."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from drivetrain.collectives import Route
from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain.cost import Cost, ModelSpec
from drivetrain.paper.contract import Planning
from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import COMPUTE, PaperStep, PaperTask
from drivetrain.paper.work import Collective, Operation, PaperUnit
from drivetrain.runtime.mesh import Axis, HostLevels
from drivetrain.sharding.options import OffloadOptions
from drivetrain.strategy import Run, Strategy
from drivetrain_local.options import AXIS, LocalOptions
from drivetrain_local.outer import fragment_of_each, wide
from drivetrain_local.sync import alone, links_of_workers, run_inside, told_numbers

Sent = Counter[tuple[str, str]]


def estimate(config: LocalOptions, model: ModelSpec, run: Run) -> Cost:
    """Return the bytes that a rank holds, and the bytes that rank 0 sends per step of a round."""
    near, far = config.planned(run.mesh, run.world)
    kind, options = config.strategy_inside()
    inside = run_inside(run, near)
    cost = kind.cost(options, model, inside)
    if far.size == 1:
        return cost
    here = kind.planning().part(options, model, inside)
    parts = _state(kind, options, model, inside)
    part = sum(parts.values())
    route = Route(far)
    if run.links.in_channels:
        route = Route(far, HostLevels(alone(near), far), links_of_workers(run))
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
        sent=_joined(cost.sent, sent),
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
        parts["outer in host memory" if stored else "outer"] += nbytes - none.get(name, 0)
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
    groups: dict[tuple[int, torch.dtype, bool], list[Stretch]] = {}
    for spec in (each for each in here.parameters if each.name in stepped):
        row = ParameterRow(spec.name, spec.shape, spec.outer_dim, 0)
        piece = Stretch.of(spec.numel, wide(spec.dtype), [row]).cut(*stepped[spec.name])
        message = fragments[spec.name], spec.dtype, spec.shape == shapes[spec.name]
        groups.setdefault(message, []).append(piece)
    sent, kept = Sent(), 0
    for pieces in groups.values():
        stretch = Stretch.joined(pieces, pieces[0].dtype)
        sent += route.gradients_summed(stretch)
        kept += route.kept_back(stretch)
    return sent, kept


def _joined(
    first: Mapping[tuple[str, str], int], second: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], int]:
    total = Sent(dict(first)) + Sent(dict(second))
    return {key: count for key, count in total.items() if count}


# --- a step on paper: the step inside of a worker, and 1/H of an exchange ---


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

    def layouts(
        self, blocks: int, heads: int, ranks: int, per_host: int
    ) -> Iterable[Mapping[str, Any]]:
        """Return none."""
        return ()

    def step(self, config: LocalOptions, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
        """Return the mean step of a round, of the ranks of one replica.

        Args:
            config: the options.
            units: in the order of forward.
            run: its ranks fill hosts of ``per_host`` ranks.
        """
        ranks = run.axes.get(AXIS, 1)
        worker = run.together(AXIS) if config.workers == "hosts" and AXIS in run.axes else 1
        workers = -(-ranks // worker)
        kind, options = config.strategy_inside()
        alone = replace(run, axes={**run.axes, AXIS: worker}, far=None)
        inside = kind.planning().step(options, units, alone)
        if workers == 1:
            return inside
        exchanges, held, stored = [], [], [dict(each) for each in inside.stored]
        beside = config.stored_inside()
        if beside:
            options = replace(options, offload=OffloadOptions())
        for stage, kinds in enumerate(inside.held):
            # A rank exchanges the elements of which it keeps the optimizer's state, in stores, too.
            there = kind.planning().step(options, units, alone).held[stage] if beside else kinds
            nbytes = there.get("optimizer", 0.0) / run.bytes.optimizer * _BYTES
            # Without a delay the step waits for the exchange; with one the exchange is beside it.
            lane = _FAR if config.delay else COMPUTE
            operations = _exchange(nbytes / config.every, workers, run)
            exchange = PaperTask("outer step", operations, lane, stage=stage)
            exchange.during = _BESIDE * nbytes / config.fragments
            exchanges.append(exchange)
            kept = STATES * nbytes
            held.append({**kinds, "outer": (1 - beside) * kept + config.under_way * nbytes})
            if beside:
                stored[stage]["host"] += beside * kept
            if run.far:
                held[-1]["errors of links"] = run.far.held * nbytes
        axes = {**inside.axes, AXIS: worker, _FAR: workers}
        return PaperStep([*inside.tasks, *exchanges], held, axes, stored)


def _exchange(nbytes: float, workers: int, run: PaperRun) -> tuple[Operation, ...]:
    """Return the operations by which a rank gets the sum over workers of so many bytes."""
    if run.far is None:
        return (Collective(_FAR, "all_reduce", nbytes),)
    ((_, operations),) = run.far.messages(AXIS, nbytes, 1, workers, divided=False)
    return operations
