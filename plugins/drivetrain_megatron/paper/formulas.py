"""Makespans by Narayanan et al. 2021 (section 2.2) and Qi et al. 2023 (section 2.3).

They are held against simulated and measured ones. All ranks compute as fast as each other, and
messages take no time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from drivetrain_megatron.pipeline.actions import ActionKind, Schedule


@dataclass(frozen=True, slots=True)
class Formula:
    """A promised makespan.

    Attributes:
        text: the formula: p ranks, m micro-batches, v chunks per rank; F and B are the durations
            of forward and backward over all chunks of a rank.
        value: the makespan, in the unit of the durations.
    """

    text: str
    value: float


def promised(schedule: Schedule, durations: Mapping[ActionKind, float]) -> Formula | None:
    """Return the makespan that is promised for a schedule, or None where no formula holds.

    Sources: GPipe and 1F1B: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.1; interleaved:
    its section 2.2.2, where p divides m; ZB-H1: Qi et al. 2023 (arXiv 2401.10241), section 2.3,
    where its three kinds take equally long and there are at least p micro-batches.

    Args:
        schedule: made by ``make_schedule``.
        durations: how long an action of each kind takes, on every stage.
    """
    formula = _FORMULAS.get(schedule.name)
    return None if formula is None else formula(schedule, durations)


def _whole(schedule: Schedule, durations: Mapping[ActionKind, float]) -> Formula:
    p, m = len(schedule.ranks), schedule.micro_batches
    both = durations[ActionKind.FORWARD] + durations[ActionKind.BACKWARD]
    return Formula("(m+p-1)(F+B)", (m + p - 1) * both)


def _interleaved(schedule: Schedule, durations: Mapping[ActionKind, float]) -> Formula | None:
    p, m = len(schedule.ranks), schedule.micro_batches
    if m % p:
        return None
    both = durations[ActionKind.FORWARD] + durations[ActionKind.BACKWARD]
    return Formula("(m+(p-1)/v)(F+B)", (m * schedule.stages // p + p - 1) * both)


def _zero_bubble(schedule: Schedule, durations: Mapping[ActionKind, float]) -> Formula | None:
    p, m = len(schedule.ranks), schedule.micro_batches
    forward = durations[ActionKind.FORWARD]
    equal = forward == durations[ActionKind.INPUT] == durations[ActionKind.WEIGHT]
    return Formula("(3m+p-1)F", (3 * m + p - 1) * forward) if equal and m >= p else None


_FORMULAS: dict[str, Callable[[Schedule, Mapping[ActionKind, float]], Formula | None]] = {
    "gpipe": _whole,
    "1f1b": _whole,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble,
}
