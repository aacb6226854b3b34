"""Ranks that stand still while nobody waits: a single rank, or all of them in code of their own.

No operation proves that such a rank is stuck, so that this is told and ends no run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.runtime.board import NATIVE
from drivetrain_launch.watching.diagnosis import standing
from drivetrain_launch.watching.usual import trains
from drivetrain_launch.watching.views import RankView


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
