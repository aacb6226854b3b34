"""Draws a step of local steps on paper: the step inside of a worker, and 1/H of an exchange."""

from collections.abc import Sequence
from dataclasses import replace

from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import COMPUTE, PaperStep, PaperTask
from drivetrain.paper.work import Collective, PaperUnit
from drivetrain_local.options import AXIS, LocalOptions

_FAR = f"{AXIS}.far"

_STATES = 2
"""Outer weights and momentum."""


def local_step(config: LocalOptions, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
    """Return the mean step of a round, of one rank.

    Args:
        config: the options.
        units: in the order of forward.
        run: its ranks of ``dp`` fill hosts of ``per_host`` ranks.
    """
    ranks = run.axes.get(AXIS, 1)
    worker = min(run.per_host, ranks) if config.workers == "hosts" else 1
    workers = -(-ranks // worker)
    kind, options = config.strategy_inside()
    inside = kind.step(options, units, replace(run, axes={**run.axes, AXIS: worker}))
    if workers == 1:
        return inside
    # This rank exchanges the elements of which it keeps the optimizer's state.
    elements = inside.held[0].get("optimizer", 0.0) / run.bytes.optimizer
    nbytes = elements * run.bytes.gradient
    message = Collective(_FAR, "all_reduce", nbytes / config.every)
    # Without a delay the step waits for the exchange; with one the exchange is beside the step.
    exchange = PaperTask("outer step", (message,), _FAR if config.delay else COMPUTE)
    return PaperStep(
        [*inside.tasks, exchange],
        [{**kinds, "outer": _STATES * nbytes} for kinds in inside.held],
        {**inside.axes, AXIS: worker, _FAR: workers},
    )
