"""Layouts that do not fit into memory: by how much, and the smallest changes that make them fit."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from drivetrain.errors import ConfigError
from drivetrain.hardware.sizes import GIB
from drivetrain.links.compressor import Honesty
from drivetrain.planner.candidates import least_candidates
from drivetrain.planner.layout import RECOMPUTE, InstalledPlans, PlannedLayout, layout_of
from drivetrain.planner.predict import FRAGMENTS, Prediction, Predictor, Task

MOST_HOSTS = 64
"""Times the hosts at hand that are looked at."""

PREDICTED = 12
"""Layouts on more hosts that are predicted in full, the smallest bounds first."""


RESERVED_GIB = 2.0
"""Of a device beside its host: the driver's context and the buffers of communication; an estimate
for some communicators, each of which takes some hundreds of MiB."""

DOUBT_OF_CELLS, DOUBT_OF_STORES = 1.03, 1.10
"""Factors on predicted times when layouts are ordered. A simpler layout is first where a cell of
ranks promises less than 3% more, or offloaded state less than 10%: predictions are off by more
(docs/planning.md), and those of stores were compared with no measurement."""

DOUBT_OF_METHODS = 1.03
"""The same factor for each class of honesty between a layout and an exact one: the time to encode
is an estimate, and nobody gives up exact training for less."""


def room_of(task: Task) -> float:
    """Return the bytes of memory of a device that a run may use."""
    reserved = RESERVED_GIB if task.hardware.host.runs_ahead else 0.0
    return (task.hardware.device.memory.gib - reserved) * GIB


def judged(prediction: Prediction) -> float:
    """Return the seconds by which a layout is compared with others."""
    stored = any(map(prediction.stored_most, ("host", "disk")))
    cell = bool(prediction.planned.kind.planning().inner_option)
    return (
        prediction.step_seconds
        * (DOUBT_OF_STORES if stored else 1.0)
        * (DOUBT_OF_CELLS if cell else 1.0)
        * DOUBT_OF_METHODS ** list(Honesty).index(prediction.planned.honesty)
    )


def fits(task: Task, prediction: Prediction) -> bool:
    """Whether a layout fits into the memory of the device, and into its host's."""
    memory = task.hardware.host.memory
    there = prediction.stored_most("host") * task.per_host
    return prediction.needed() <= room_of(task) and (memory is None or there <= memory.gib * GIB)


def remedies(predictor: Predictor, planned: PlannedLayout) -> list[str]:
    """Return changes of a layout, each of which alone makes it fit; the smallest of each kind."""
    found: list[str] = []
    for change in _changes(planned, predictor.installed):
        key = next(iter(change))
        if not any(line.startswith(f"{key}=") for line in found) and _fits(
            predictor, {**planned.keys, **change}
        ):
            found.append(",".join(f"{key}={value}" for key, value in change.items()))
    return [*found, more_hosts(predictor.task, planned.precision)]


def _changes(planned: PlannedLayout, installed: InstalledPlans) -> Iterator[dict[str, str]]:
    """Yield changes of keys, the smallest of each kind first."""
    for recompute in RECOMPUTE[RECOMPUTE.index(planned.recompute) + 1 :]:
        yield {"recompute": recompute}
    micro_batch = planned.micro_batch // 2
    while micro_batch:
        yield {"micro_batch": str(micro_batch)}
        micro_batch //= 2
    for name in installed.planned:
        yield {"data_parallel": name}
    for keys in installed.every[planned.keys["data_parallel"]].layouts(1, 1, 1, 1):
        if keys:
            yield {key: str(value) for key, value in keys.items()}


def _fits(predictor: Predictor, keys: dict[str, str]) -> bool:
    try:
        return fits(predictor.task, predictor.predict(layout_of(keys, predictor.installed)))
    except ConfigError:
        return False


def _smallest(predictor: Predictor, layouts: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the smallest layouts by their bounds, where the bounds fit."""
    bounds: list[tuple[float, dict[str, str]]] = []
    for keys in layouts:
        with suppress(ConfigError):
            nbytes = predictor.bound(layout_of(keys, predictor.installed)).nbytes
            if nbytes * FRAGMENTS <= room_of(predictor.task):
                bounds.append((nbytes, keys))
    yield from (keys for _, keys in sorted(bounds, key=lambda each: each[0])[:PREDICTED])


def more_hosts(task: Task, precision: str) -> str:
    """Return the fewest hosts, in steps of two, on which some layout fits, with that layout."""
    factor = 2
    while factor <= MOST_HOSTS:
        larger = replace(task, hosts=task.hosts * factor, batch=task.batch * factor)
        predictor = Predictor(larger)
        for keys in _smallest(predictor, least_candidates(larger, precision, predictor.installed)):
            if fits(larger, predictor.predict(layout_of(keys, predictor.installed))):
                text = ",".join(f"{key}={value}" for key, value in keys.items())
                return f"{larger.hosts} hosts (with a batch of {larger.batch}: {text})"
        factor *= 2
    return f"more than {task.hosts * MOST_HOSTS} hosts"
