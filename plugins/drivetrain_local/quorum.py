"""The agreement on who takes part in an exchange, over the store where the ranks of the run met.

Workers agree by two kinds of keys. Nobody waits longer than ``late_s``, whoever stands still::

    decision    {"number": 7, "workers": [0, 2]}    the latest exchange, and its participants
    ready/2     8                                   the exchange for which worker 2 stands ready

A worker that stands ready for exchange 8 waits until all stand ready or its time is over, and then
puts decision 8 in the place of decision 7. The store lets only one of them do so (compare and set),
and all read the decision that stands there. A worker that was ready in time finds itself in it, and
the others know that it will come; a worker that is late finds a decision without itself.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_POLL_SHARE, _SHORTEST_POLL_S, _LONGEST_POLL_S = 0.1, 1e-3, 0.05
"""The store is asked after pauses of this share of the time waited, within these bounds."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Who takes part in an exchange.

    Attributes:
        number: of the exchange, from 1; 0 before the first one.
        workers: those that take part, in ascending order.
    """

    number: int
    workers: Sequence[int]


class Quorum:
    """Decides who takes part in each exchange of one order.

    Args:
        store: the keys of this order, on all workers the same.
        worker: number of this worker.
        workers: how many there are.
        late_s: seconds that this worker waits for others.
    """

    def __init__(self, store: Any, worker: int, workers: int, late_s: float) -> None:
        self._store = store
        self._worker = worker
        self._workers = workers
        self._late_s = late_s

    def decide(self, number: int, *, opens: bool) -> Decision | None:
        """Return the decision about an exchange, or about a later one if this worker is late.

        Args:
            number: of the exchange that follows the one of which this worker has the result.
            opens: whether to wait for others if none of them stands ready yet.

        Returns:
            The decision; None if nobody stands ready, and this worker does not open the exchange.
        """
        _, latest = self._latest()
        if latest.number >= number:
            return latest
        if not opens and not self._ready(number):
            return None
        self._store.set(f"ready/{self._worker}", str(number))
        start = time.monotonic()
        while True:
            found, latest = self._latest()
            if latest.number >= number:
                return latest
            waited = time.monotonic() - start
            ready = self._ready(number)
            if len(ready) == self._workers or waited >= self._late_s:
                proposal = json.dumps(asdict(Decision(number, ready)))
                self._store.compare_set("decision", found, proposal)
            else:
                pause(waited)

    def _latest(self) -> tuple[str, Decision]:
        """Return the latest decision, also as the store has it."""
        if not self._store.check(["decision"]):
            return "", Decision(0, ())
        found = self._store.get("decision").decode()
        return found, Decision(**json.loads(found))

    def _ready(self, number: int) -> list[int]:
        """Return the workers that stand ready for an exchange."""
        keys = {worker: f"ready/{worker}" for worker in range(self._workers)}
        return [
            worker
            for worker, key in keys.items()
            if self._store.check([key]) and int(self._store.get(key)) == number
        ]


def pause(waited: float) -> None:
    """Let some time pass before the store is asked again, given the seconds waited so far."""
    time.sleep(min(max(_POLL_SHARE * waited, _SHORTEST_POLL_S), _LONGEST_POLL_S))
