"""The layouts of a search: every division that installed strategies declare."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from drivetrain.planner.layout import RECOMPUTE, InstalledPlans
from drivetrain.planner.predict import Task

MICRO_BATCHES = (1, 2, 4, 8, 16)


def candidates(task: Task, precision: str, installed: InstalledPlans) -> Iterator[dict[str, str]]:
    """Yield the keys of every layout that installed strategies declare."""
    return _divisions(task, precision, installed, MICRO_BATCHES, RECOMPUTE)


def least_candidates(
    task: Task, precision: str, installed: InstalledPlans
) -> Iterator[dict[str, str]]:
    """Yield the layouts with the fewest activations alone."""
    return _divisions(task, precision, installed, MICRO_BATCHES[:1], RECOMPUTE[-1:])


def _divisions(
    task: Task,
    precision: str,
    installed: InstalledPlans,
    micro_batches: Sequence[int],
    modes: Sequence[str],
) -> Iterator[dict[str, str]]:
    size = task.model.layers, task.model.heads, task.ranks, task.per_host
    around: list[Mapping[str, object]] = [{}]
    for plan in installed.around.values():
        around += plan.layouts(*size)
    inner = [
        (name, keys) for name, plan in installed.planned.items() for keys in plan.layouts(*size)
    ]
    for outside, (name, inside), micro_batch, recompute in product(
        around, inner, micro_batches, modes
    ):
        own = {"micro_batch": micro_batch, "recompute": recompute, "precision": precision}
        keys = {**outside, **inside, **own, "data_parallel": name}
        yield {key: str(value).lower() for key, value in keys.items()}
