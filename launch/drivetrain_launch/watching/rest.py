"""The usual lengths of a run, and ranks that stand still for longer while nobody waits for them.

A rank rests while nothing on its board changes. What lasts several times the longest of before is
unusual, and worth a line.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.runtime.board import NATIVE
from drivetrain_launch.watching.diagnosis import standing
from drivetrain_launch.watching.views import RankView

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


# --- ranks that stand still while nobody waits ---

# No operation proves that such a rank is stuck, so that this is told and ends no run.


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """Ranks that have done nothing for an unusual time.

    Attributes:
        culprits: these ranks.
        usual_s: the longest rest of before, in seconds.
        views: the states of all ranks that are known.
        waiting: nobody.
    """

    culprits: Sequence[int]
    usual_s: float
    views: Mapping[int, RankView]
    waiting: Sequence[int] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Values that are equal for one rest at two moments."""
        return "rest", tuple(self.culprits)

    def sentence(self) -> str:
        """Return which ranks stand still, and where, in one sentence."""
        who = ", and ".join(standing(self.views[rank]) for rank in self.culprits)
        before = f"{self.usual_s:.0f} s" if self.usual_s else "a second"
        return f"{who}; no rank waits there, and before it took {before} at most"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "sentence": self.sentence(),
            "kind": "rest",
            "culprits": list(self.culprits),
            "waiting": [],
            "usual_s": round(self.usual_s, 1),
            "ranks": [view.to_json() for _, view in sorted(self.views.items())],
        }


def resting(views: Mapping[int, RankView], limit_s: float, usual_s: float) -> Rest | None:
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
    return Rest(culprits=found, usual_s=usual_s, views=views) if found else None
