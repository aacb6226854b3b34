"""Draws a step of local steps on paper: the step inside of a worker, and 1/H of an exchange."""

from collections.abc import Sequence
from dataclasses import replace

from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import COMPUTE, PaperStep, PaperTask
from drivetrain.paper.work import Collective, Operation, PaperUnit
from drivetrain.sharding.options import OffloadOptions
from drivetrain_local.options import AXIS, LocalOptions

_FAR = f"{AXIS}.far"

STATES = 2
"""Outer weights and momentum."""

_BESIDE = 2
"""Outer gradients of a fragment in one tensor when its exchange starts, and of one parameter by
itself, which may be as large."""

_BYTES = 4
"""Outer weights, their momentum and outer gradients are of the optimizer's tensors, in fp32."""


def local_step(config: LocalOptions, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
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
    inside = kind.step(options, units, alone)
    if workers == 1:
        return inside
    exchanges, held, stored = [], [], [dict(each) for each in inside.stored]
    beside = config.stored_inside()
    if beside:
        options = replace(options, offload=OffloadOptions())
    for stage, kinds in enumerate(inside.held):
        # A rank exchanges the elements of which it keeps the optimizer's state, in stores, too.
        there = kind.step(options, units, alone).held[stage] if beside else kinds
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
