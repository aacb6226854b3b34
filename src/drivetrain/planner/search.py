"""The search: every layout that installed strategies declare, judged by bounds, then played.

Bounds come first, from the work of single units: a layout whose bound does not fit is left out. The
others are played in full in the order of their bounds, until no bound beats the best. Approximate
traffic between hosts comes last, where a user allows it: the forms of a few exact layouts.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivetrain.errors import ConfigError
from drivetrain.hardware.sizes import size_text
from drivetrain.links.compressor import Honesty
from drivetrain.planner.candidates import APPROXIMATED, Approximations, candidates
from drivetrain.planner.fit import fits, judged, more_hosts, room_of
from drivetrain.planner.layout import PlannedLayout, layout_of
from drivetrain.planner.predict import FRAGMENTS, Prediction, Predictor, Task

PLAYED = 10
"""Layouts that are played in full at least, the most promising bounds first."""

MOST_PLAYED = 40
"""Layouts that are played in full at most."""


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search.

    Attributes:
        best: predictions in the order of ``judged``; never empty.
        tried: layouts that were looked at.
        left_out: how many were not played, by reason.
    """

    best: Sequence[Prediction]
    tried: int
    left_out: Mapping[str, int]


def search(task: Task, precision: str, allow: Honesty = Honesty.EXACT) -> Found:
    """Return the best layouts for a task.

    Args:
        task: see there.
        precision: of the layouts.
        allow: how far training may be from exact training, by methods between hosts.

    Raises:
        ConfigError: no layout fits, or none divides the batch and the ranks.
    """
    peaks = task.hardware.device.teraflops
    if precision not in peaks:
        raise ConfigError(
            f"expected a --precision that {task.hardware.name} computes in, {', '.join(peaks)}, "
            f"found {precision}"
        )
    predictor = Predictor(task)
    room = room_of(task)
    left_out: Counter[str] = Counter()
    sketches: list[tuple[float, PlannedLayout]] = []
    smallest: tuple[float, PlannedLayout] | None = None
    tried = 0
    for keys in candidates(task, precision, predictor.installed):
        tried += 1
        try:
            planned = layout_of(keys, predictor.installed)
            bound = predictor.bound(planned)
        except ConfigError as error:
            left_out[_reason(str(error))] += 1
            continue
        needed = bound.nbytes * FRAGMENTS
        if smallest is None or needed < smallest[0]:
            smallest = needed, planned
        if needed > room:
            left_out["do not fit into memory, by their bound"] += 1
        else:
            sketches.append((bound.seconds, planned))
    sketches.sort(key=lambda each: each[0])
    best = _played(predictor, sketches, left_out)
    if allow is not Honesty.EXACT:
        forms = Approximations(predictor, allow)
        exact = [each.planned for each in best[:APPROXIMATED]]
        exact += [each for each in forms.lightest(sketches, room) if each not in exact]
        approximate = [form for each in exact for form in forms.of(each)]
        tried += len(approximate)
        best = _with_approximate(predictor, best, approximate, left_out)
    if not best:
        raise ConfigError(_nowhere(predictor, smallest, room, precision))
    return Found(best, tried, {reason: count for reason, count in left_out.items() if count})


def _played(
    predictor: Predictor,
    sketches: Sequence[tuple[float, PlannedLayout]],
    left_out: Counter[str],
) -> list[Prediction]:
    """Play the most promising layouts, until enough of them fit."""
    best: list[Prediction] = []
    for index, (seconds, planned) in enumerate(sketches):
        enough = len(best) >= PLAYED
        if enough and seconds >= judged(best[0]):
            left_out["are slower, by their bound, than the best"] += len(sketches) - index
            break
        if len(best) >= MOST_PLAYED:
            left_out[f"have a later bound than the {MOST_PLAYED} that were played"] += (
                len(sketches) - index
            )
            break
        prediction = predictor.predict(planned)
        if not fits(predictor.task, prediction):
            left_out["do not fit into memory"] += 1
            continue
        best.append(prediction)
        best.sort(key=judged)
    return best


def _with_approximate(
    predictor: Predictor,
    exact: Sequence[Prediction],
    approximate: Sequence[PlannedLayout],
    left_out: Counter[str],
) -> list[Prediction]:
    """Return all exact layouts, and the approximate layouts that are quicker than all of these."""
    best = list(exact)
    quickest = min((each.step_seconds for each in exact), default=math.inf)
    for planned in approximate:
        if predictor.bound(planned).seconds >= quickest:
            left_out["are approximate, and slower than an exact one"] += 1
            continue
        prediction = predictor.predict(planned)
        if not fits(predictor.task, prediction):
            left_out["do not fit into memory"] += 1
        elif prediction.step_seconds >= quickest:
            left_out["are approximate, and slower than an exact one"] += 1
        else:
            best.append(prediction)
    return sorted(best, key=judged)


def _reason(text: str) -> str:
    """Return why a layout cannot be, without its numbers, so that reasons can be counted."""
    if "--batch" in text:
        return "do not divide the batch"
    if "on paper" in text:
        return "are of strategies whose time is not drawn"
    return "do not divide the model or the ranks"


def _nowhere(
    predictor: Predictor, smallest: tuple[float, PlannedLayout] | None, room: float, precision: str
) -> str:
    task = predictor.task
    if smallest is None:
        return (
            f"no layout divides a batch of {task.batch} and {task.ranks} ranks; take a batch that "
            "is a multiple of the ranks"
        )
    needed, planned = smallest
    text = planned.text(predictor.divisions(planned)[0]["dp"])
    return (
        f"no layout fits: the smallest, {text}, needs {size_text(round(needed))} of "
        f"{size_text(round(room))} on its worst rank, {size_text(round(needed - room))} too much; "
        f"take {more_hosts(task, precision)}, or devices with more memory"
    )
