"""Schedules of Huang et al. 2019, Narayanan et al. 2021 and Qi et al. 2023, as lists of actions.

A model is cut into stages. Rank ``r`` of ``p`` holds the stages ``r``, ``r + p``, ``r + 2p``, …. A
schedule is one list of actions per rank: forward, backward, and the two halves of backward. Sends
and receives are not listed, since they follow: the next stage needs whatever a stage produces.

Names in this file: ``p`` ranks, ``m`` micro-batches, ``v`` stages (chunks of the model) per rank.

- GPipe (Huang et al. 2019, arXiv 1811.06965): all forwards, then all backwards. Keeps m
  micro-batches.
- 1F1B (Narayanan et al. 2021, arXiv 2006.09503, section 2.2): as soon as the first gradient may
  come, one forward and one backward in turn. As fast as GPipe, but rank r keeps p - r
  micro-batches.
- Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): v chunks per rank, which
  divides the idle time by v and sends v times as often.
- ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 2.3): backward in two halves. The gradients of
  weights fill the time in which a rank would wait, and p micro-batches are kept.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.errors import ConfigError, write_text


class ActionKind(StrEnum):
    """The kind of an action; its value is the letter that drawings and traces show."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of inputs and of weights."""
    INPUT = "I"
    """Only the gradient of the stage's input, which the stage before waits for."""
    WEIGHT = "W"
    """Only the gradients of weights, which nobody waits for."""

    @property
    def returns(self) -> bool:
        """Whether the action makes the gradient for the stage before."""
        return self in (ActionKind.BACKWARD, ActionKind.INPUT)

    @property
    def frees(self) -> bool:
        """Whether nothing of the micro-batch is kept afterwards."""
        return self in (ActionKind.BACKWARD, ActionKind.WEIGHT)


class Action(NamedTuple):
    """One computation of one stage for one micro-batch; both are counted over all."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}@{self.stage}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every rank of a pipeline in one step, in order.

    The number of stages is a multiple of the number of ranks.
    """

    name: str
    stages: int
    micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]


def needs(action: Action, stages: int) -> list[Action]:
    """Return the actions, of this stage and of its neighbors, that must end before one begins.

    Where backward may be whole or in halves (``BACKWARD`` or ``INPUT``), the kind is that of the
    action.
    """
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind is ActionKind.FORWARD:
        return [Action(kind, stage - 1, micro_batch)] if stage else []
    if kind is ActionKind.WEIGHT:
        return [Action(ActionKind.INPUT, stage, micro_batch)]
    own = Action(ActionKind.FORWARD, stage, micro_batch)
    return [own, Action(kind, stage + 1, micro_batch)] if stage + 1 < stages else [own]


def interleaved(p: int, m: int, v: int) -> Iterator[tuple[Action, ...]]:
    """Return interleaved 1F1B: a group of p micro-batches passes through all chunks, then the next.

    Where p does not divide m, groups are as even as they can be and not smaller than p: with
    smaller ones ranks would wait for each other for ever. Fewer than p micro-batches are one group.
    """
    count = max(1, m // p)
    groups = [m // count + (index < m % count) for index in range(count)]
    first = (v - 1) * groups[0]
    return (_alternate(rank, p, groups, v, ahead=first + 2 * (p - rank - 1)) for rank in range(p))


SCHEDULES: dict[str, Callable[[int, int, int], Iterable[tuple[Action, ...]]]] = {
    # All forwards, then all backwards.
    "gpipe": lambda p, m, v: (_alternate(rank, p, [m], ahead=m) for rank in range(p)),
    # Rank r runs p - r - 1 forwards ahead of the first backward.
    "1f1b": lambda p, m, v: (_alternate(rank, p, [m], ahead=p - rank - 1) for rank in range(p)),
    "interleaved": interleaved,
    "zb-h1": lambda p, m, v: _ZeroBubble(p, m).run(),
}


def make_schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Return a schedule by name, for p ranks, m micro-batches and v stages per rank.

    Raises:
        ConfigError: there is no such schedule, or the numbers do not fit it.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"expected a schedule of {sorted(SCHEDULES)}, found {name!r}")
    if min(p, m, v) < 1:
        raise ConfigError(
            f"expected at least one rank, micro-batch and chunk, found {p} ranks, {m} "
            f"micro-batches and {v} chunks"
        )
    if v > 1 and name != "interleaved":
        raise ConfigError(
            f"expected one chunk per rank for the schedule {name!r}, found {v}; set "
            "schedule=interleaved, or chunks=1"
        )
    return Schedule(name, p * v, m, tuple(SCHEDULES[name](p, m, v)))


def _rounds(groups: Sequence[int], chunks: range) -> Iterator[tuple[int, int]]:
    """Yield (chunk, micro-batch): one group after the other, each through all chunks."""
    first = 0
    for size in groups:
        for chunk in chunks:
            for micro_batch in range(first, first + size):
                yield chunk, micro_batch
        first += size


def _alternate(
    rank: int, p: int, groups: Sequence[int], v: int = 1, *, ahead: int
) -> tuple[Action, ...]:
    """Return a rank's actions: some forwards, then each backward with a forward before, if any.

    First come ``ahead`` forwards. The micro-batches of a group pass through all v chunks together.
    """
    forwards = iter(_rounds(groups, range(v)))
    actions = [(ActionKind.FORWARD, *each) for each in islice(forwards, ahead)]
    for backward in _rounds(groups, range(v - 1, -1, -1)):
        actions += [(ActionKind.FORWARD, *each) for each in islice(forwards, 1)]
        actions.append((ActionKind.BACKWARD, *backward))
    return tuple(Action(kind, chunk * p + rank, i) for kind, chunk, i in actions)


class _ZeroBubble:
    """The state of all ranks while ZB-H1 is worked out, one unit of time after the other.

    Forward and both halves of backward take one unit of time. Rank r keeps at most p - r
    micro-batches whose gradient has not come, as in 1F1B, and p of which any half is missing.
    Within these limits a rank prefers a forward, then the gradient for which the stage before
    waits, then weights: 3m + p - 1 units in all, where 1F1B takes 3m + 3(p - 1).
    """

    def __init__(self, p: int, m: int) -> None:
        self._p, self._m = p, m
        self._done: set[Action] = set()
        self._counts = [dict.fromkeys(ActionKind, 0) for _ in range(p)]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each rank."""
        ranks: list[list[Action]] = [[] for _ in range(self._p)]
        while sum(map(len, ranks)) < 3 * self._m * self._p:
            chosen = [self._choose(rank) for rank in range(self._p)]
            for rank, action in enumerate(chosen):
                if action is not None:
                    ranks[rank].append(action)
                    self._counts[rank][action.kind] += 1
                    self._done.add(action)
        return tuple(map(tuple, ranks))

    def _choose(self, rank: int) -> Action | None:
        counts = self._counts[rank]
        forward, inputs, weights = (
            Action(kind, rank, counts[kind])
            for kind in (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT)
        )
        begun = counts[ActionKind.FORWARD]
        room = (
            begun < self._m
            and begun - counts[ActionKind.INPUT] < self._p - rank
            and begun - counts[ActionKind.WEIGHT] < self._p
        )
        if room and self._arrived(forward, rank - 1):
            return forward
        if inputs.micro_batch < begun and self._arrived(inputs, rank + 1):
            return inputs
        return weights if weights.micro_batch < counts[ActionKind.INPUT] else None

    def _arrived(self, action: Action, neighbor: int) -> bool:
        if not 0 <= neighbor < self._p:
            return True
        return Action(action.kind, neighbor, action.micro_batch) in self._done


# --- the times of a pipeline's actions on every rank, also as a Chrome trace ---

# Traces are for chrome://tracing and ui.perfetto.dev. The format is the JSON object form of the
# Trace Event Format: complete events (phase ``X``) with begin and duration in microseconds. The
# pipeline is a process of the trace and each rank a thread, so that ranks are rows under each
# other.


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran, in seconds or units of time since the step began."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """The spans of every rank's actions, in order: worked out by ``simulate``, or measured."""

    ranks: tuple[tuple[Span, ...], ...]

    @cached_property
    def start(self) -> float:
        """When the first action of all ranks begins; 0 without any."""
        return min((span.start for rank in self.ranks for span in rank), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Time from the first begin to the last end over all ranks; 0 without any action."""
        stop = max((span.stop for rank in self.ranks for span in rank), default=0.0)
        return stop - self.start

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which they wait, from 0 to 1."""
        return self._idle(self.ranks)

    def idle_of(self, rank: int) -> float:
        """Return the share of the makespan in which a rank waits, from 0 to 1."""
        return self._idle(self.ranks[rank : rank + 1])

    def kept(self, rank: int) -> int:
        """Return how many micro-batches of its stages a rank keeps at most."""
        kept = most = 0
        for span in self.ranks[rank]:
            kept += span.action.kind is ActionKind.FORWARD
            most = max(most, kept)
            kept -= span.action.kind.frees
        return most

    def _idle(self, ranks: tuple[tuple[Span, ...], ...]) -> float:
        time = self.makespan * len(ranks)
        busy = sum(span.stop - span.start for rank in ranks for span in rank)
        return 1.0 - busy / time if time else 0.0


_MICROSECONDS = 1e6


def to_trace(timeline: Timeline, *, name: str = "pipeline") -> dict[str, Any]:
    """Return a timeline with a title as a trace; a simulated unit of time is a second."""
    return {"traceEvents": list(_events(timeline, name)), "displayTimeUnit": "ms"}


def save_trace(timeline: Timeline, path: Path, *, name: str = "pipeline") -> None:
    """Write a timeline as a trace; arguments as in ``to_trace``.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps(to_trace(timeline, name=name), allow_nan=False) + "\n")


def _events(timeline: Timeline, name: str) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", 0, {"name": name})
    for rank, spans in enumerate(timeline.ranks):
        yield _metadata("thread_name", rank, {"name": f"rank {rank}"})
        yield _metadata("thread_sort_index", rank, {"sort_index": rank})
        for span in spans:
            action = span.action
            yield {
                "ph": "X",
                "name": f"{action.kind.value}{action.micro_batch}",
                "cat": action.kind.name.lower(),
                "pid": 0,
                "tid": rank,
                "ts": (span.start - timeline.start) * _MICROSECONDS,
                "dur": (span.stop - span.start) * _MICROSECONDS,
                "args": {"stage": action.stage, "micro_batch": action.micro_batch},
            }


def _metadata(name: str, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": rank, "args": arguments}
