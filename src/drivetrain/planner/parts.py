"""The parts of a predicted step: the busiest stage's kernels and waits, and a host's messages."""

from collections import Counter
from collections.abc import Mapping

from drivetrain.hardware.prices import AxisPlace, HardwarePrices
from drivetrain.paper.step import COMPUTE, STORE_LANES, PaperStep, PaperTask, PlayedStep, PlayedTask
from drivetrain.paper.work import Collective, MatrixProduct, MemoryPass

PRODUCTS, PASSES = "products", "memory passes"
STARTS = "kernel starts"
STAGES = "other stages"
BESIDE = "slowed by messages"


def link_part(axis: str) -> str:
    """Return the name of the part in which a rank waits for an axis, or for a store's lane."""
    return f"offloaded state: {axis}" if axis in STORE_LANES else f"messages over {axis}"


def parts_of(step: PaperStep, played: PlayedStep, prices: HardwarePrices) -> Mapping[str, float]:
    """Return the seconds of a step on its busiest stage, by part.

    They add up to the step: products, memory passes, the starts of kernels where the host's
    processor is slower than the device, messages that the rank waits for, and other stages of a
    pipeline.
    """
    stage = max(range(len(played.computing)), key=played.computing.__getitem__)
    parts: Counter[str] = Counter()
    before = 0.0
    for each in played.tasks:
        if each.task.stage == stage and each.task.lane == COMPUTE:
            _add_wait(parts, each.start - before, _awaited(played, each))
            _add_work(parts, each, prices)
            before = each.stop
    last = max(played.tasks, key=lambda each: each.stop, default=None)
    if last is not None:
        _add_wait(parts, played.seconds - before, last)
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _awaited(played: PlayedStep, each: PlayedTask) -> PlayedTask | None:
    """Return the task whose end a task waited for."""
    before = [played.tasks[index] for index in each.task.after]
    return max(before, key=lambda one: one.stop, default=None)


def _add_wait(parts: "Counter[str]", seconds: float, awaited: PlayedTask | None) -> None:
    """Add a wait: for a message as long as it was under way, for another stage the rest."""
    if seconds <= 0:
        return
    if awaited is None or awaited.task.lane == COMPUTE:
        parts[STAGES] += seconds  # type: ignore[assignment]
        return
    alone = any(each.operation == "send" for each in _messages(awaited.task))
    travel = min(seconds, awaited.stop - awaited.start) if alone else seconds
    parts[link_part(awaited.task.lane)] += travel  # type: ignore[assignment]
    parts[STAGES] += seconds - travel  # type: ignore[assignment]


def _add_work(parts: "Counter[str]", each: PlayedTask, prices: HardwarePrices) -> None:
    task, total = each.task, each.stop - each.start
    spent = 0.0
    for operation in task.operations:
        seconds = prices.price(operation) * task.repeat
        match operation:
            case MatrixProduct():
                parts[PRODUCTS] += seconds  # type: ignore[assignment]
            case MemoryPass():
                parts[PASSES] += seconds  # type: ignore[assignment]
            case Collective():
                parts[link_part(operation.axis)] += seconds  # type: ignore[assignment]
        spent += seconds
    alone = prices.seconds(task)
    parts[STARTS] += alone - spent  # type: ignore[assignment]
    parts[BESIDE] += total - alone  # type: ignore[assignment]


def _messages(task: PaperTask) -> list[Collective]:
    return [each for each in task.operations if isinstance(each, Collective)]


def leaving_hosts(sent: Mapping[tuple[str, str], float], places: Mapping[str, AxisPlace]) -> float:
    """Return the bytes that a host sends to others: one rank of each line that crosses the host.

    Args:
        sent: by a rank, by axis and operation.
        places: how the lines of each axis lie on hosts.
    """
    crossing = {name: place for name, place in places.items() if place.spans_hosts}
    return sum(
        nbytes * crossing[axis].beside for (axis, _), nbytes in sent.items() if axis in crossing
    )


def difference(parts: Mapping[str, float], others: Mapping[str, float]) -> tuple[str, float]:
    """Return the part in which a step loses most against another step, and its seconds."""
    lost = {name: seconds - others.get(name, 0.0) for name, seconds in parts.items()}
    name = max(lost, key=lost.__getitem__)
    return name, lost[name]
