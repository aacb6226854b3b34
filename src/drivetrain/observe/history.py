"""The records of a run put together: its starts, curves, numbers and summary.

Curves and numbers of a run, made of its records: means over ranks, rates, shares of a step.

A run in a few numbers, as people write them: for the top of a page and for the terminal.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from drivetrain.hardware.sizes import size_text
from drivetrain.observe.figures import (
    RUN,
    SECTIONS,
    RankJournal,
    RankTimes,
    StartFolder,
    StepFigures,
    Straggler,
    merged,
    starts_of,
    stragglers,
)

# --- the records of a run put together ---


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """One start of the script, in words.

    Attributes:
        name: of its folder.
        first: number of its first step; 0 without a step.
        last: number of its last step.
        seconds: from the begin of its first step to the end of its last one.
        resumed: the checkpoint that it went on from; "" for none.
        outcome: how it ended.
        good: whether that is the end of a whole run.
    """

    name: str
    first: int
    last: int
    seconds: float
    resumed: str
    outcome: str
    good: bool


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run from its first step to its last known step.

    Attributes:
        name: of the run, for titles.
        folder: the folder with its starts.
        facts: of the last start: configuration, environment, models.
        starts: the starts that belong to the run.
        ranks: the records of each rank, without those that a later start has repeated.
        headers: facts of each rank in the last start: its host, and who does the same work.
        repeated: how many steps were taken again after a restart.
        remarks: what is missing or torn, in sentences.
    """

    name: str
    folder: Path
    facts: Mapping[str, Any]
    starts: Sequence[StartOutcome]
    ranks: Mapping[int, Sequence[StepFigures]]
    headers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    repeated: int = 0
    remarks: Sequence[str] = field(default_factory=tuple)

    @property
    def main(self) -> Sequence[StepFigures]:
        """The records of the lowest rank that wrote any; empty in an empty run."""
        return next((records for records in self.ranks.values() if records), ())

    @property
    def restarts(self) -> Sequence[int]:
        """The first step of each start after the first one."""
        return [start.first for start in self.starts[1:] if start.first]

    @property
    def skipped(self) -> Sequence[int]:
        """The skipped steps; the last step of a record stands for all of its steps."""
        return [each.step for each in self.main if each.skipped]


def load_history(folder: str | Path) -> RunHistory:
    """Read a run, as far as it is there; it may still be going on.

    Args:
        folder: of the project, of its run, or of one start.

    Raises:
        ConfigError: no run was recorded there.
    """
    every = starts_of(folder)
    journals = [start.journals() for start in every]
    first = max(i for i in range(len(every)) if i == 0 or not _continues(every[i], journals[i]))
    starts, read = every[first:], journals[first:]
    remarks = _remarks(starts, read)
    if first:
        remarks.append(
            f"{first} earlier start{'s' * (first > 1)} in this folder began anew, and are not "
            "shown; name the folder of a start to see it alone"
        )
    ranks: dict[int, list[StepFigures]] = {}
    repeated = 0
    for found in read:
        for rank, journal in found.items():
            kept = ranks.setdefault(rank, [])
            begin = journal.records[0].step if journal.records else None
            while kept and begin is not None and kept[-1].step >= begin:
                again = kept.pop().steps
                repeated += again if rank == min(found) else 0  # once, and not for each rank
            kept.extend(journal.records)
    path = every[0].path.parent
    return RunHistory(
        name=(path.parent if path.name == RUN else path).resolve().name,
        folder=path,
        facts=next((facts for start in reversed(starts) if (facts := start.facts())), {}),
        starts=[_outcome(*pair) for pair in zip(starts, read, strict=True)],
        ranks=dict(sorted(ranks.items())),
        headers={rank: journal.header for rank, journal in read[-1].items()},
        repeated=repeated,
        remarks=remarks,
    )


def _continues(start: StartFolder, journals: Mapping[int, RankJournal]) -> bool:
    """Whether a start goes on with the run before it: restarted, or resumed from a checkpoint."""
    return bool(start.facts().get("restarts")) or bool(_event(journals, "resumed"))


def _event(journals: Mapping[int, RankJournal], name: str) -> Mapping[str, Any]:
    """Return the first event of a name on any rank; empty where there is none."""
    events = (event for journal in journals.values() for _, event in journal.events)
    return next((event for event in events if event.get("event") == name), {})


def _outcome(start: StartFolder, journals: Mapping[int, RankJournal]) -> StartOutcome:
    records = next((each.records for each in journals.values() if each.records), ())
    failed, ended = _event(journals, "failed"), _event(journals, "ended")
    outcome = "no end is recorded: it is running, or was killed"
    if failed:
        outcome = f"failed: {failed.get('error', 'no reason given')}"
    elif ended:
        said = ended.get("outcome", "ended")
        outcome = said if records else f"{said} without a step"
    return StartOutcome(
        name=start.path.name,
        first=records[0].step - records[0].steps + 1 if records else 0,
        last=records[-1].step if records else 0,
        seconds=sum(each.seconds for each in records),
        resumed=str(_event(journals, "resumed").get("source", "")),
        outcome=outcome,
        good=bool(ended and not failed) and ended.get("outcome") != "preempted",
    )


def _remarks(starts: Sequence[StartFolder], read: Sequence[Mapping[int, RankJournal]]) -> list[str]:
    """Return in sentences which parts of the records are missing."""
    remarks = []
    for start, journals in zip(starts, read, strict=True):
        facts = start.facts()
        if not facts and any(journal.records for journal in journals.values()):
            remarks.append(f"{start.path.name}: run.json is missing or torn: no configuration")
        missing = sorted(set(range(int(facts.get("ranks", 0)))) - set(journals))
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            remarks.append(
                f"{start.path.name}: no records of rank{'s' * (len(missing) > 1)} {shown}: they "
                "lie on another host, or the run ended before their first line"
            )
        for rank, journal in journals.items():
            if journal.torn:
                lines = f"{journal.torn} torn line{'s' * (journal.torn > 1)}"
                remarks.append(f"{start.path.name}: {lines} of rank {rank} left out")
    if not any(journal.records for journals in read for journal in journals.values()):
        remarks.append("no step has been recorded yet")
    return remarks


# --- curves and numbers of a run, made of its records ---

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
    ranks, replicas = history.facts.get("ranks", 1), (history.facts.get("mesh") or {}).get("dp", 1)
    return Curve(found.steps, found.values / max(1.0, int(ranks) / max(1, int(replicas))))


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


def waited(times: Mapping[str, float]) -> float:
    """Return the seconds of waiting for any axis, of those that ``breakdown`` found on a rank."""
    return sum(seconds for name, seconds in times.items() if name.startswith(WAITING))


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


# --- a run in a few numbers, as people write them ---


def in_seconds(seconds: float) -> str:
    """Return ``310 us``, ``41 ms``, ``3.2 s``, ``4 min 10 s`` or ``2 h 05 min``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def in_short(number: float) -> str:
    """Return ``12.3 k``, ``4.5 M``, ``7.0 G``; small numbers to four digits."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{number:.4g}"


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a summary.

    Attributes:
        name: short.
        value: with its unit.
        note: how it came about; "" where the name says enough.
    """

    name: str
    value: str
    note: str = ""


def summary_of(run: RunHistory) -> list[Number]:
    """Return the numbers that the records have; without a step there are few."""
    numbers = [*_training(run), *_speed(run), *_resources(run)]
    return [number for number in numbers if number is not None]


def _training(run: RunHistory) -> list[Number | None]:
    if not run.main:
        return [Number("steps", "0")]
    loss = mean_curve(run, lambda each: each.loss)
    known = loss.values[np.isfinite(loss.values)]
    began = run.main[0].time - run.main[0].seconds
    whole, trained = run.main[-1].time - began, sum(start.seconds for start in run.starts)
    skipped = sum(each.skipped for each in run.main)
    bad = sum(each.loss is not None and not np.isfinite(each.loss) for each in run.main)
    smooth = loss.smooth().values
    last = smooth[np.isfinite(smooth)]
    return [
        Number("steps", f"{run.main[-1].step:,}", _restarts(run)),
        Number("duration", in_seconds(trained), _when(began, whole - trained)),
        Number("loss", f"{last[-1]:.4g}", f"at first {known[0]:.4g}") if len(known) else None,
        Number("skipped steps", str(skipped), "gradients were not finite") if skipped else None,
        Number("losses not finite", str(bad), "of the lowest rank") if bad else None,
    ]


def _restarts(run: RunHistory) -> str:
    count = len(run.starts) - 1
    if not count:
        return ""
    again = f", {run.repeated:,} steps taken again" if run.repeated else ""
    return f"{count} restart{'s' * (count > 1)}{again}"


def _when(began: float, between: float) -> str:
    """Return when the first step began, and the time between the starts where that is worth it."""
    said = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began))
    return said + (f"; {in_seconds(between)} between starts not counted" if between >= 1 else "")


def _speed(run: RunHistory) -> list[Number | None]:
    seconds = step_seconds(run)
    samples = middle(rate_curve(run, lambda each: each.samples))
    tokens = middle(rate_curve(run, lambda each: each.tokens))
    return [
        Number("time of a step", in_seconds(seconds), "median") if seconds else None,
        Number("samples per second", in_short(samples), "all ranks, median") if samples else None,
        Number("tokens per second", in_short(tokens), "all ranks, median") if tokens else None,
        _utilization(run, tokens),
        _waiting(run),
        _stragglers(run),
    ]


def _utilization(run: RunHistory, tokens: float | None) -> Number | None:
    """Return the MFU with formula and peak; without a known peak, the operations per second."""
    work = operations_per_token(run)
    if tokens is None or work is None:
        return None
    formula = f"{in_short(work)} operations a token: 4 N + 2 trained N (6 N where all are trained)"
    found = utilization(run, tokens)
    if found is None:
        device = (run.facts.get("environment") or {}).get("device", "this device")
        note = f"{formula}; no published peak is known for {device}, so there is no MFU"
        return Number("FLOP/s", in_short(work * tokens), note)
    peak = run.facts["peak"]
    rate = in_short(peak["operations_per_second"])
    note = f"{formula}; peak of {peak['device']} in {peak['of']}: {rate} a second"
    if "source" in peak:  # runs of earlier versions name none
        note += f" ({peak['source']})"
    return Number("MFU", f"{found:.1%}", note)


def _waiting(run: RunHistory) -> Number | None:
    """Return the share of a step that the ranks wait, and the rank that the others wait for."""
    found = breakdown(run)
    if len(found) < 2:
        return None
    waits = {rank: waited(times) for rank, times in found.items()}
    whole = sum(sum(times.values()) for times in found.values())
    least, most = min(waits, key=lambda rank: waits[rank]), max(waits.values())
    note = "of the time of all ranks"
    if most > 2 * waits[least] and most > 0.1 * whole / len(found):
        note += f"; rank {least} waits least, the others wait for it"
    return Number("waiting", f"{sum(waits.values()) / whole:.0%}", note)


def _stragglers(run: RunHistory) -> Number | None:
    """Return who was slower than the others, and in which part of a step."""
    found = slow_ranks(run)
    if not found:
        return None
    named = ", ".join(
        f"{'rank' if len(each.ranks) == 1 else 'ranks'} {', '.join(map(str, each.ranks))}"
        for each in found
    )
    return Number("stragglers", named, "; ".join(map(str, found)))


def _resources(run: RunHistory) -> list[Number | None]:
    sent = sum(bytes_per_step(run).values())
    promised = promised_bytes(run)
    note = "" if promised is None else f"promised: {size_text(sum(promised.values()))}"
    every = [each for records in run.ranks.values() for each in records]
    device = max((each.memory.get("device_peak", 0) for each in every), default=0)
    resident = max((each.memory.get("resident", 0) for each in every), default=0)
    return [
        Number("device memory", size_text(device), "most of any rank") if device else None,
        Number("memory", size_text(resident), "resident, most of any rank") if resident else None,
        Number("sent in a step", size_text(sent), note) if sent else None,
    ]


def side_by_side(summaries: Sequence[Sequence[Number]]) -> list[tuple[str, list[str]]]:
    """Return the numbers of several runs by name; "" where a run has none."""
    names = dict.fromkeys(number.name for summary in summaries for number in summary)
    tables = [{number.name: number.value for number in summary} for summary in summaries]
    return [(name, [table.get(name, "") for table in tables]) for name in names]


def differences(runs: Sequence[RunHistory]) -> list[tuple[str, list[str]]]:
    """Return the keys of the configurations that differ, with the value in each run."""
    tables = [_values(run.facts) for run in runs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    if len({run.facts.get("strategy") for run in runs}) > 1:  # options of one of them alone
        keys = [
            key for key in keys if all(key in table for table in tables) or key in _chosen(runs)
        ]
    rows = [(key, [table.get(key, "not set") for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _chosen(runs: Sequence[RunHistory]) -> set[str]:
    """Return the keys that somebody has chosen in any run."""
    rows = (row for run in runs for row in run.facts.get("configuration", ()))
    return {row["key"] for row in rows if row["origin"] != "default"}


def _values(facts: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _text(value) for name, value in (facts.get("started") or {}).items()}
    found |= {each["key"]: _text(each["value"]) for each in facts.get("configuration", ())}
    for name in ("ranks", "accumulation"):
        if name in facts:
            found[name] = _text(facts[name])
    for i, model in enumerate(facts.get("models", ())):
        found[f"parameters of model {i}" if i else "parameters of the model"] = (
            f"{model['parameters']:,}"
        )
    return found | {
        f"environment: {name}": _text(value)
        for name, value in (facts.get("environment") or {}).items()
    }


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
