"""Who keeps whom waiting, from the states of all ranks: one sentence, and plain values.

A rank waits in an operation for as long as it is under way. Whoever has not handed over the
operation of that number is absent; whoever has another one under its number mismatches; whoever a
signal has stopped is stopped, wherever that happened. A rank rests while nothing on its board
changes, and nobody need wait for it. What lasts several times the longest of before is unusual, and
worth a line.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.runtime.board import NATIVE
from drivetrain_launch.watching.answers import OperationView, RankView, main_thread, script_site

SECTIONS = {
    "data": "the data loader",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the optimizer",
    "checkpoint": "a checkpoint",
    "evaluation": "an evaluation",
}
"""Sections of a step in words; any other is the script's own work."""

SHORTEST_S = 8.0
"""A wait of less is no hang, whatever is usual: with a look and the stacks, 10 seconds at most."""

START_S = 60.0
"""The same for ranks that have not begun to train: they load data and models at their own pace."""

SHORTEST_REST_S = 60.0
"""A rest of less is nothing to speak of where nobody waits: scripts do many things on their own."""

BEGUN = 50
"""A rank that has handed over so many operations in one order trains, whatever its section."""

TIMES_USUAL, TIMES_REST = 3.0, 5.0
"""A wait, or a rest, is unusual from so many times the longest of the last ones on."""

REMEMBERED, NOTEWORTHY_S = 50, 1.0
"""How many rests are remembered, and the length of the shortest waits and rests that are."""

WAITS_AGE_S = 3600.0
"""A wait is remembered for so long, and for this attempt: a slow phase of a run says nothing about
the phases long after it."""

_LOADING = ("torch/utils/data/", "drivetrain/data/")
_SAVING = ("drivetrain/checkpoint/",)

Kind = Literal["absent", "mismatch", "stopped", "circle", "none", "rest"]
REST: Kind = "rest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Ranks that have waited for too long, or done nothing for an unusual time.

    Attributes:
        kind: how the culprits keep the others waiting; "none" where all came and nothing moves;
            "rest" where nobody waits.
        culprits: the ranks that keep others waiting, or rest.
        waiting: the ranks that wait.
        operation: for which they wait; None of a rest.
        waited_s: for how long.
        usual_s: of a rest, the longest of before, in seconds.
        views: the states of all ranks that are known.
    """

    kind: Kind
    culprits: Sequence[int]
    waiting: Sequence[int] = ()
    operation: OperationView | None = None
    waited_s: float = 0.0
    usual_s: float = 0.0
    views: Mapping[int, RankView]

    @property
    def key(self) -> tuple[Any, ...]:
        """Values that are equal for one hang at two moments."""
        first = (self.kind, tuple(self.culprits))
        operation = self.operation
        return first if operation is None else (*first, operation.place, operation.running)

    def sentence(self) -> str:
        """Return who keeps whom waiting, or which ranks stand still, in one sentence."""
        operation = self.operation
        if operation is None:
            who = ", and ".join(standing(self.views[rank]) for rank in self.culprits)
            before = f"{self.usual_s:.0f} s" if self.usual_s else "a second"
            return f"{who}; no rank waits there, and before it took {before} at most"
        waiting, site = _ranks(self.waiting), self._site(self.waiting[0])
        plural = "" if len(self.waiting) > 1 else "s"
        where = f"{operation.name}{f' at {site}' if site else ''}"
        if self.kind == "mismatch":
            others = "; ".join(self._other(rank, operation) for rank in self.culprits)
            return (
                f"{waiting} wait{plural} in {where} of {operation.size}, but {others}: ranks "
                "must run the same operations in the same order"
            )
        if self.kind == "none":
            return (
                f"{waiting} came to {where}, and nothing has moved for {self.waited_s:.0f} s: "
                "look at the network between the hosts"
            )
        whom = "it" if len(self.culprits) == 1 else "them"
        who = ", and ".join(self._where(rank) for rank in self.culprits)
        return f"{who}; {waiting} wait{plural} for {whom} in {where}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        facts: dict[str, Any] = {"usual_s": round(self.usual_s, 1)}
        if self.operation is not None:
            facts = {
                "operation": self.operation.name,
                "number": self.operation.running,
                "waited_s": round(self.waited_s, 1),
            }
        return {
            "sentence": self.sentence(),
            "kind": self.kind,
            "culprits": list(self.culprits),
            "waiting": list(self.waiting),
            **facts,
            "ranks": [view.to_json() for _, view in sorted(self.views.items())],
        }

    def _where(self, rank: int) -> str:
        """Return where a rank is, and for how long."""
        view, site = self.views[rank], self._site(rank)
        if view.state == "ended":
            return f"rank {rank} on {view.host} has ended"
        if self.kind == "circle":
            operation = view.longest()
            name = operation.name if operation is not None else "an operation"
            return f"rank {rank} on {view.host} waits in {name}{f' ({site})' if site else ''}"
        return standing(view)

    def _other(self, rank: int, expected: OperationView) -> str:
        operation = self.views[rank].at(expected.place)
        found = f"{operation.name} of {operation.size}" if operation is not None else "another one"
        site = self._site(rank)
        same = operation is not None and operation.name == expected.name
        why = " of another step, or with other chunks" if same else ""
        return f"rank {rank} in {found}{why}{f' at {site}' if site else ''}"

    def _site(self, rank: int) -> str:
        return script_site(self.views[rank].stack)


def mismatch(views: Mapping[int, RankView]) -> Hang | None:
    """Return two different operations with one number on a device, None where there are none.

    Operations on a device do not check each other: gradients of different steps would be added up.
    What a number stands for on a rank never changes, so that ranks may be seen at any moment.
    """
    seen: dict[tuple[str, int], tuple[int, OperationView]] = {}
    for rank, view in sorted(views.items()):
        for each in view.operations:
            if not each.place.endswith(NATIVE) or not each.running or not each.checksum:
                continue
            first, other = seen.setdefault((each.place, each.running), (rank, each))
            if other.checksum != each.checksum:
                return Hang(
                    kind="mismatch",
                    culprits=[rank],
                    waiting=[first],
                    operation=other,
                    waited_s=other.running_s,
                    views=views,
                )
    return None


def diagnose(views: Mapping[int, RankView], limit_s: Callable[[str], float]) -> Hang | None:
    """Return the hang of the longest wait, None while nobody has waited for so long.

    Args:
        views: the states of the ranks that are known, by global rank.
        limit_s: returns the seconds that a wait may take in the order of operations of a name.
    """
    waits = {
        rank: operation
        for rank, view in views.items()
        if not view.state and (operation := _longest(view, limit_s)) is not None
    }
    if not waits:
        return None
    first = max(waits, key=lambda rank: waits[rank].running_s)
    operation = waits[first]
    members = [rank for rank in operation.ranks or sorted(views) if rank in views]
    kind, culprits = _culprits(views, waits, operation, members)
    if kind == "none" and all(each.place.endswith(NATIVE) for each in waits.values()):
        return None  # what a device has finished is not on the board
    waiting = [rank for rank in members if rank in waits and waits[rank].place == operation.place]
    return Hang(
        kind=kind,
        culprits=culprits,
        waiting=[rank for rank in waiting if rank not in culprits] or waiting,
        operation=operation,
        waited_s=operation.running_s,
        views=views,
    )


def _longest(view: RankView, limit_s: Callable[[str], float]) -> OperationView | None:
    """Return the longest wait of a rank, if any takes too long."""
    waits = [each for each in view.operations if each.running]
    late = [each for each in waits if each.running_s >= limit_s(each.place)]
    return max(late, key=lambda each: each.running_s, default=None)


def _culprits(
    views: Mapping[int, RankView],
    waits: Mapping[int, OperationView],
    operation: OperationView,
    members: Sequence[int],
) -> tuple[Kind, Sequence[int]]:
    """Return the ranks that keep others waiting, and how."""
    stopped = [rank for rank, view in sorted(views.items()) if view.state == "stopped"]
    if stopped:
        return "stopped", stopped
    others = {rank: views[rank].at(operation.place) for rank in members}
    odd = [
        rank
        for rank, other in others.items()
        if other is not None
        and other.running == operation.running
        and 0 not in (other.checksum, operation.checksum)
        and other.checksum != operation.checksum
    ]
    if odd:
        return "mismatch", odd
    absent = [
        rank
        for rank, other in others.items()
        if (other.submitted if other is not None else 0) < operation.running
    ]
    idle = [rank for rank in absent if rank not in waits]
    if idle:
        return "absent", idle
    return ("circle", absent) if absent else ("none", [])


def standing(view: RankView) -> str:
    """Return where a rank stands still, and for how long."""
    if view.state == "stopped":
        return (
            f"rank {view.rank} on {view.host}, pid {view.pid}, was stopped by a signal; "
            f"'kill -CONT {view.pid}' lets it go on"
        )
    site = script_site(view.stack)
    return (
        f"rank {view.rank} on {view.host} has been in {_section(view)} for "
        f"{view.still_s:.0f} s{f' ({site})' if site else ''}"
    )


def _section(view: RankView) -> str:
    """Return the rank's place in words: the stack knows it better than the section."""
    files = [frame.file for frame in main_thread(view.stack)]
    if any(part in file for file in files for part in _LOADING):
        return SECTIONS["data"]
    if any(part in file for file in files for part in _SAVING):
        return SECTIONS["checkpoint"]
    return SECTIONS.get(view.section, "the script")


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``ranks 0 to 2 and 5``."""
    runs = []
    for _, group in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        if len(run) > 2:
            runs.append(f"{run[0]} to {run[-1]}")
        else:
            runs += map(str, run)
    joined = ", ".join(runs[:-1]) + (" and " if runs[:-1] else "") + runs[-1]
    return f"rank{'s' if len(ranks) > 1 else ''} {joined}"


# --- the usual lengths of a run, and ranks that stand still for longer while nobody waits ---


class Usual:
    """Remembers the waits and rests of all ranks.

    Waits count where all ranks train: before that, ranks wait for each other for as long as one of
    them reads data for all. Each order of operations has waits of its own.
    """

    def __init__(self) -> None:
        self._waits: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)
        self._rests: deque[float] = deque(maxlen=REMEMBERED)
        self._waiting: dict[tuple[int, str, int], float] = {}
        self._resting: dict[int, float] = {}

    @property
    def longest_rest_s(self) -> float:
        """The longest of the last rests."""
        return max(self._rests, default=0.0)

    @property
    def rest_limit_s(self) -> float:
        """How long a rank may rest."""
        return max(SHORTEST_REST_S, TIMES_REST * self.longest_rest_s)

    def wait_limit_s(self, views: Mapping[int, RankView], place: str) -> float:
        """Return how long a wait may take in one order of operations."""
        shortest = SHORTEST_S if all(map(trains, views.values())) else START_S
        longest = max((seconds for _, seconds in self._waits.get(place, ())), default=0.0)
        return max(shortest, TIMES_USUAL * longest)

    def learn(self, views: Mapping[int, RankView], now: float) -> None:
        """Remember the lengths of waits and rests that have ended.

        Args:
            views: the states of all ranks, by global rank.
            now: the moment, in seconds of a monotonic clock.
        """
        self._learn_waits(views, now)
        self._learn_rests(views)

    def _learn_waits(self, views: Mapping[int, RankView], now: float) -> None:
        waiting = {
            (view.rank, each.place, each.running): each.running_s
            for view in views.values()
            for each in view.operations
            if each.running and each.running_s >= NOTEWORTHY_S
        }
        for (rank, place, number), seconds in self._waiting.items():
            if (rank, place, number) not in waiting:
                self._waits[place].append((now, seconds))
        self._waiting = waiting if all(map(trains, views.values())) else {}
        for waits in self._waits.values():
            while waits and now - waits[0][0] > WAITS_AGE_S:
                waits.popleft()

    def _learn_rests(self, views: Mapping[int, RankView]) -> None:
        rests = {view.rank: view.still_s for view in views.values() if trains(view)}
        over = [
            seconds for rank, seconds in self._resting.items() if rests.get(rank, 0.0) < seconds
        ]
        if over and max(over) >= NOTEWORTHY_S:
            self._rests.append(max(over))
        self._resting = rests


def trains(view: RankView) -> bool:
    """Whether a rank has begun to train; without a report it shows no sections."""
    return bool(view.section) or any(each.submitted >= BEGUN for each in view.operations)


# No operation proves that such a rank is stuck, so that this is told and ends no run.


def resting(views: Mapping[int, RankView], limit_s: float, usual_s: float) -> Hang | None:
    """Return the ranks that rest for too long while no rank waits, None where there are none.

    Args:
        views: the states of the ranks that are known, by global rank.
        limit_s: seconds that a rest may take.
        usual_s: the longest rest of before.
    """
    if any(
        each.running and not each.place.endswith(NATIVE)  # the host does not wait for a device
        for view in views.values()
        for each in view.operations
    ):
        return None
    found = [
        rank
        for rank, view in sorted(views.items())
        if view.still_s >= limit_s and trains(view) and view.state != "ended"
    ]
    if not found:
        return None
    return Hang(kind=REST, culprits=found, usual_s=usual_s, views=views)
