"""The search: every layout that installed strategies declare, judged by bounds, then played.

A layout is sketched first: one micro-batch is played, which bounds its time and its memory from
below. Only layouts whose bounds beat the best ones found are played in full.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch.forecast.sizes import GIB, size_text
from drivetrain_launch.planner.layout import RECOMPUTE, layout_of
from drivetrain_launch.planner.predict import Prediction, Predictor, Task

PLAYED = 24
"""Layouts that are played in full, the most promising sketches first."""

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
    predictor = Predictor(task)
    room = task.hardware.device.memory.gib * GIB
    left_out: Counter[str] = Counter()
    sketches: list[Prediction] = []
    smallest: Prediction | None = None
    tried = 0
    for keys in candidates(task, precision):
        tried += 1
        try:
            sketch = predictor.sketch(layout_of(keys))
        except ConfigError as error:
            left_out[_reason(str(error))] += 1
            continue
        if smallest is None or sketch.needed() < smallest.needed():
            smallest = sketch
        if sketch.needed() > room:
            left_out["do not fit into memory with a single micro-batch"] += 1
            continue
        sketches.append(sketch)
    if not sketches:
        raise ConfigError(_nowhere(task, smallest, room))
    best = _played(predictor, sorted(sketches, key=lambda each: each.step_seconds), room, left_out)
    if not best:
        raise ConfigError(_nowhere(task, smallest, room))
    return Found(best, tried, {reason: count for reason, count in left_out.items() if count})


def _played(
    predictor: Predictor, sketches: Sequence[Prediction], room: float, left_out: Counter[str]
) -> list[Prediction]:
    """Play the most promising sketches, until enough of them fit and no bound can beat them."""
    best: list[Prediction] = []
    for index, sketch in enumerate(sketches):
        if len(best) >= PLAYED and sketch.step_seconds >= best[0].step_seconds:
            left_out["are slower by their bound than the best"] += len(sketches) - index
            break
        prediction = predictor.predict(sketch.planned)
        if prediction.needed() > room:
            left_out["do not fit into memory with all micro-batches in flight"] += 1
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
    return "do not divide the model or the ranks"


def _nowhere(task: Task, smallest: Prediction | None, room: float) -> str:
    if smallest is None:
        return (
            f"no layout divides a batch of {task.batch} and {task.ranks} ranks; take a batch that "
            "is a multiple of the ranks"
        )
    missing = round(smallest.needed() - room)
    more, hosts = "", task.hosts
    while hosts < task.hosts * 64:
        hosts *= 2
        if smallest.needed() * task.hosts / hosts <= room:
            more = f"; about {hosts} hosts would hold it"
            break
    needed = size_text(round(smallest.needed()))
    return (
        f"no layout fits: the smallest, {smallest.layout}, needs {needed} of "
        f"{size_text(round(room))} on its worst rank, {size_text(missing)} too much{more}; take "
        "more devices, or devices with more memory"
    )
