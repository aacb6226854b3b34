"""A run in a few numbers, as people write them: for the top of a page and for the terminal."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drivetrain.reporting import measures
from drivetrain.reporting.history import RunHistory
from drivetrain.reporting.measures import WAITING


def in_bytes(count: float) -> str:
    """Return ``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


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
    loss = measures.mean_curve(run, lambda each: each.loss)
    known = loss.values[np.isfinite(loss.values)]
    began = run.main[0].time - run.main[0].seconds
    skipped = sum(each.skipped for each in run.main)
    bad = sum(each.loss is not None and not np.isfinite(each.loss) for each in run.main)
    smooth = loss.smooth().values
    last = smooth[np.isfinite(smooth)]
    return [
        Number("steps", f"{run.main[-1].step:,}", _restarts(run)),
        Number("duration", in_seconds(run.main[-1].time - began), _when(began)),
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


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _speed(run: RunHistory) -> list[Number | None]:
    seconds = measures.step_seconds(run)
    samples = measures.middle(measures.rate_curve(run, lambda each: each.samples))
    tokens = measures.middle(measures.rate_curve(run, lambda each: each.tokens))
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
    work = measures.operations_per_token(run)
    if tokens is None or work is None:
        return None
    formula = f"{in_short(work)} operations a token: 4 N + 2 trained N (6 N where all are trained)"
    found = measures.utilization(run, tokens)
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
    found = measures.breakdown(run)
    if len(found) < 2:
        return None
    waits = {
        rank: sum(seconds for name, seconds in times.items() if name.startswith(WAITING))
        for rank, times in found.items()
    }
    whole = sum(sum(times.values()) for times in found.values())
    least, most = min(waits, key=lambda rank: waits[rank]), max(waits.values())
    note = "of the time of all ranks"
    if most > 2 * waits[least] and most > 0.1 * whole / len(found):
        note += f"; rank {least} waits least, the others wait for it"
    return Number("waiting", f"{sum(waits.values()) / whole:.0%}", note)


def _stragglers(run: RunHistory) -> Number | None:
    """Return who was slower than the others, and in which part of a step."""
    found = measures.slow_ranks(run)
    if not found:
        return None
    named = ", ".join(
        f"{'rank' if len(each.ranks) == 1 else 'ranks'} {', '.join(map(str, each.ranks))}"
        for each in found
    )
    return Number("stragglers", named, "; ".join(map(str, found)))


def _resources(run: RunHistory) -> list[Number | None]:
    sent = sum(measures.bytes_per_step(run).values())
    promised = measures.promised_bytes(run)
    note = "" if promised is None else f"promised by cost(): {in_bytes(sum(promised.values()))}"
    every = [each for records in run.ranks.values() for each in records]
    device = max((each.memory.get("device_peak", 0) for each in every), default=0)
    resident = max((each.memory.get("resident", 0) for each in every), default=0)
    return [
        Number("device memory", in_bytes(device), "most of any rank") if device else None,
        Number("memory", in_bytes(resident), "resident, most of any rank") if resident else None,
        Number("sent in a step", in_bytes(sent), note) if sent else None,
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
    found = {each["key"]: _text(each["value"]) for each in facts.get("configuration", ())}
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
