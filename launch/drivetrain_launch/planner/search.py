"""The search: every layout that installed strategies declare, judged by bounds, then played.

Bounds come first, from the work of single units: a layout whose bound does not fit is left out. The
others are played in full in the order of their bounds, until no bound beats the best.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil

from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch.forecast.sizes import GIB, size_text
from drivetrain_launch.planner.layout import RECOMPUTE, PlannedLayout, layout_of
from drivetrain_launch.planner.predict import FRAGMENTS, Prediction, Predictor, Task

PLAYED = 10
"""Layouts that are played in full at least, the most promising bounds first."""

MOST_PLAYED = 40
"""Layouts that are played in full at most."""

MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search.

    Attributes:
        best: predictions, the quickest first; never empty.
        tried: layouts that were looked at.
        left_out: how many were not played, by reason.
    """

    best: Sequence[Prediction]
    tried: int
    left_out: Mapping[str, int]


def search(task: Task, precision: str) -> Found:
    """Return the best layouts for a task.

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
    room = task.hardware.device.memory.gib * GIB
    left_out: Counter[str] = Counter()
    sketches: list[tuple[float, PlannedLayout]] = []
    smallest: tuple[float, PlannedLayout] | None = None
    tried = 0
    for keys in candidates(task, precision):
        tried += 1
        try:
            planned = layout_of(keys)
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
    best = _played(predictor, sketches, room, left_out)
    if not best:
        raise ConfigError(_nowhere(predictor, smallest, room))
    return Found(best, tried, {reason: count for reason, count in left_out.items() if count})


def _played(
    predictor: Predictor,
    sketches: Sequence[tuple[float, PlannedLayout]],
    room: float,
    left_out: Counter[str],
) -> list[Prediction]:
    """Play the most promising layouts, until enough of them fit."""
    best: list[Prediction] = []
    for index, (seconds, planned) in enumerate(sketches):
        enough = len(best) >= PLAYED
        if enough and seconds >= best[0].step_seconds:
            left_out["are slower, by their bound, than the best"] += len(sketches) - index
            break
        if len(best) >= MOST_PLAYED:
            left_out["promise less than those that were played"] += len(sketches) - index
            break
        prediction = predictor.predict(planned)
        if prediction.needed() > room:
            left_out["do not fit into memory"] += 1
            continue
        best.append(prediction)
        best.sort(key=lambda each: each.step_seconds)
    return best


def candidates(task: Task, precision: str) -> Iterator[dict[str, str]]:
    """Yield the keys of every layout that installed strategies declare."""
    registry = strategies()
    kinds = {name: registry.load(name) for name in registry.names}
    around: list[Mapping[str, object]] = [{}]
    for kind in kinds.values():
        if kind.inner_option:
            shape = task.shape
            around += kind.layouts(shape.layers, shape.heads, task.ranks, task.per_host)
    inner = [
        (name, keys)
        for name, kind in kinds.items()
        if not kind.inner_option and not kind.reference and kind.draws_steps()
        for keys in kind.layouts(task.shape.layers, task.shape.heads, task.ranks, task.per_host)
    ]
    for outside, (name, inside), micro_batch, recompute in product(
        around, inner, MICRO_BATCHES, RECOMPUTE
    ):
        own = {"micro_batch": micro_batch, "recompute": recompute, "precision": precision}
        keys = {**outside, **inside, **own, "data_parallel": name}
        yield {key: str(value).lower() for key, value in keys.items()}


def _reason(text: str) -> str:
    """Return why a layout cannot be, without its numbers, so that reasons can be counted."""
    if "--batch" in text:
        return "do not divide the batch"
    if "on paper" in text:
        return "are of strategies whose time is not drawn"
    return "do not divide the model or the ranks"


def _nowhere(
    predictor: Predictor, smallest: tuple[float, PlannedLayout] | None, room: float
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
        f"take more hosts ({task.hosts * ceil(needed / room)}, where all of it is divided), or "
        "devices with more memory"
    )
