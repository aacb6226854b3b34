"""Curves and numbers of a run, made of its records: means over ranks, rates, shares of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from drivetrain.reporting.history import RunHistory
from drivetrain.telemetry.figures import SECTIONS, StepFigures, merged
from drivetrain.telemetry.work import RankTimes, Straggler, stragglers

Numbers: TypeAlias = NDArray[np.float64]

SMOOTHED_PART = 25
"""A running mean covers one of so many parts of a curve."""

USUAL_MARGIN = 0.3
"""The margin of stragglers where the facts of a run have none, as the option's default."""

WAITING = "waiting "
"""Before the name of the mesh axis that a rank waits on."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values by step.

    Attributes:
        steps: numbers of optimizer steps, ascending.
        values: as many; NaN where a step has none.
    """

    steps: Numbers
    values: Numbers

    @property
    def is_empty(self) -> bool:
        """Whether no step has a finite value."""
        return not bool(np.isfinite(self.values).any())

    def known(self) -> "Curve":
        """Return the steps with a finite value."""
        finite = np.isfinite(self.values)
        return Curve(self.steps[finite], self.values[finite])

    def smooth(self) -> "Curve":
        """Return a running mean over a part of the curve, of the values that are finite."""
        width = max(1, len(self.values) // SMOOTHED_PART)
        finite = np.isfinite(self.values)
        weight = np.ones(width)
        begin = width // 2
        window = slice(begin, begin + len(self.values))  # as many values before as after
        count = np.convolve(finite, weight)[window]
        total = np.convolve(np.where(finite, self.values, 0.0), weight)[window]
        with np.errstate(invalid="ignore", divide="ignore"):
            return Curve(self.steps, total / count)


Value: TypeAlias = Callable[[StepFigures], float | None]


def curve(records: Sequence[StepFigures], value: Value) -> Curve:
    """Return a value of one rank's records."""
    values = [np.nan if (found := value(each)) is None else found for each in records]
    return Curve(np.array([each.step for each in records], float), np.array(values, float))


def mean_curve(history: RunHistory, value: Value) -> Curve:
    """Return the mean over ranks, at the steps of the lowest rank's records."""
    return _combined(history, value, np.nanmean)


def rate_curve(history: RunHistory, count: Callable[[StepFigures], int]) -> Curve:
    """Return counts of all replicas per second of training; ranks of one cell count once.

    Time for evaluation and checkpoints does not count.
    """

    def rate(each: StepFigures) -> float | None:
        seconds = training_seconds(each)
        return count(each) / seconds if seconds > 0 and count(each) else None

    found = _combined(history, rate, np.nansum)
    return Curve(found.steps, found.values / _ranks_per_replica(history))


def training_seconds(each: StepFigures) -> float:
    """Return the seconds of a record without evaluation and checkpoints."""
    sections = each.sections
    return each.seconds - sections.get("evaluation", 0.0) - sections.get("checkpoint", 0.0)


def step_seconds(history: RunHistory) -> float | None:
    """Return the median time of a training step, None without a step."""
    records = steady(history.main)
    times = [training_seconds(each) / each.steps for each in records]
    return float(np.median(times)) if times else None


def breakdown(history: RunHistory) -> dict[int, dict[str, float]]:
    """Return the mean seconds of a step by rank: each section, and waiting for each axis."""
    found: dict[int, dict[str, float]] = {}
    for rank, records in history.ranks.items():
        kept = steady(records)
        steps = sum(each.steps for each in kept)
        axes = sorted({axis for each in kept for axis in each.waiting})
        if not steps:
            continue
        found[rank] = {
            name: sum(each.sections.get(name, 0.0) for each in kept) / steps for name in SECTIONS
        } | {
            WAITING + axis: sum(each.waiting.get(axis, 0.0) for each in kept) / steps
            for axis in axes
        }
    return found


def slow_ranks(history: RunHistory) -> list[Straggler]:
    """Return the ranks and hosts that were slower than the others, over the whole run."""
    rows = history.facts.get("configuration") or ()
    margins = [row["value"] for row in rows if row["key"] == "launch.straggler_margin"]
    works = [
        RankTimes.of(rank, history.headers.get(rank, {}), reduce(merged, steady(records)))
        for rank, records in history.ranks.items()
        if records
    ]
    return stragglers(works, float(margins[0]) if margins else USUAL_MARGIN)


def bytes_per_step(history: RunHistory) -> dict[str, float]:
    """Return the bytes that the lowest rank sent in a step, as a median, by axis/operation."""
    kept = steady(history.main)
    keys = sorted({key for each in kept for key in each.sent})
    return {
        key: float(np.median([each.sent.get(key, 0) / each.steps for each in kept])) for key in keys
    }


def promised_bytes(history: RunHistory) -> dict[str, float] | None:
    """Return the bytes that the strategies promised to send in a step; None without a promise."""
    models = history.facts.get("models") or []
    if not models or any("sent" not in model for model in models):
        return None
    keys = sorted({key for model in models for key in model["sent"]})
    return {key: float(sum(model["sent"].get(key, 0) for model in models)) for key in keys}


def operations_per_token(history: RunHistory) -> float | None:
    """Return 4 N + 2 T operations for N parameters, T of them trained; None without a model.

    2 N for forward, 2 N for the gradients of activations, 2 T for those of weights: 6 N where all
    are trained (Kaplan et al. 2020, section 2.1). Attention over the context is left out.
    """
    models: Sequence[Mapping[str, Any]] = history.facts.get("models") or []
    found = sum(4.0 * model["parameters"] + 2.0 * model["trained"] for model in models)
    return found or None


def utilization(history: RunHistory, tokens_per_second: float | None) -> float | None:
    """Return the model FLOPs utilization (MFU); None without tokens or a known peak."""
    peak, work = history.facts.get("peak"), operations_per_token(history)
    if not peak or work is None or not tokens_per_second:
        return None
    ranks = int(history.facts.get("ranks", 1))
    return float(work * tokens_per_second / (ranks * peak["operations_per_second"]))


def middle(found: Curve) -> float | None:
    """Return the median of a curve's finite values after its first one, None without any."""
    values = found.values[np.isfinite(found.values)]
    values = values[1:] if len(values) > 2 else values
    return float(np.median(values)) if len(values) else None


def steady(records: Sequence[StepFigures]) -> Sequence[StepFigures]:
    """Return the records without the first, whose step makes buffers and compiles kernels."""
    return records[1:] if len(records) > 2 else records


def _combined(history: RunHistory, value: Value, combine: Callable[..., Any]) -> Curve:
    """Combine a value of all ranks at the steps of the lowest rank's records."""
    steps = np.array([each.step for each in history.main], float)
    rows = []
    for records in history.ranks.values():
        own = curve(records, value)
        known = np.isfinite(own.values)
        if known.any():
            row = np.interp(steps, own.steps[known], own.values[known], np.nan, np.nan)
            exact = np.isin(steps, own.steps[~known])
            rows.append(np.where(exact, np.nan, row))
    if not rows:
        return Curve(steps, np.full(len(steps), np.nan))
    stacked = np.stack(rows)
    values = np.full(len(steps), np.nan)
    some = np.isfinite(stacked).any(axis=0)
    values[some] = combine(stacked[:, some], axis=0)
    return Curve(steps, values)


def _ranks_per_replica(history: RunHistory) -> float:
    replicas = (history.facts.get("mesh") or {}).get("dp", 1)
    return max(1.0, int(history.facts.get("ranks", 1)) / max(1, int(replicas)))
