"""The watch over the ranks of one attempt: who stands still, and who is slow.

A wait of several times the usual length is a hang: it is said in one sentence, with the stacks of
whoever keeps others waiting, and written to a file beside the logs. So is a long rest of ranks for
which nobody waits; only a hang may end the run. Over several hosts each launcher shows its ranks to
host 0, which judges.

Stragglers of an attempt: the times of all ranks, read from their files, and compared.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.observe.figures import RankTimes, Straggler, read_work, stragglers
from drivetrain_launch.watching.answers import (
    STACKS,
    BoardReader,
    RankView,
    ask,
    ask_flights,
    compare,
    newest,
)
from drivetrain_launch.watching.diagnosis import (
    REST,
    SHORTEST_S,
    Hang,
    Usual,
    diagnose,
    mismatch,
    resting,
)

# --- the watch over the ranks of one attempt ---

PERIOD_S = 0.5
"""Seconds between two looks."""

SHOW_S = 2.0
"""How often a launcher shows its ranks to host 0."""

SHOWN_LINES = 30
"""Lines of stacks on the console; all of them are in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The connection to the launchers of other hosts.

    Attributes:
        show: sends the states of the ranks here to host 0.
        others: returns the states of other hosts' ranks, by rank; on host 0 alone.
        judges: whether this is host 0.
    """

    show: Callable[[Sequence[dict[str, Any]]], None]
    others: Callable[[], Mapping[int, Mapping[str, Any]]]
    judges: bool = True


class HangWatch:
    """Looks at the ranks of this host in one attempt.

    Args:
        pids: process ids of the ranks here, by global rank.
        boards: path of each rank's board, by global rank.
        hosts: the other launchers; None on one host.
        stops: whether a hang ends the run.
        folder: for the file about a hang, or None.
        say: shows a line to the user.

    Attributes:
        hang: the hang that shall end the run, if any.
    """

    def __init__(
        self,
        pids: Mapping[int, int],
        boards: Mapping[int, Path],
        *,
        hosts: Hosts | None = None,
        stops: bool = False,
        folder: Path | None = None,
        say: Callable[[str], None],
    ) -> None:
        self._readers = [BoardReader(rank, pid, boards[rank]) for rank, pid in pids.items()]
        self._hosts, self._stops, self._folder, self._say = hosts, stops, folder, say
        self._over = threading.Event()
        self._usual = Usual()
        self._asked: dict[int, tuple[float, RankView]] = {}
        self._told: tuple[Any, ...] = ()
        self._shown = 0.0
        self.hang: Hang | None = None
        self._thread = threading.Thread(target=self._look_on, name="drivetrain-watch", daemon=True)

    def __enter__(self) -> "HangWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for reader in self._readers:
            reader.close()

    # --- the thread ---

    def _look_on(self) -> None:
        while not self._over.wait(PERIOD_S):
            try:
                self.look()
            except Exception as error:  # whatever it is: the ranks go on
                if not self._over.is_set():
                    self._say(f"the watch over hanging ranks has ended: {error!r}")
                return

    def look(self) -> None:
        """Look once, and report a new hang."""
        views = {view.rank: view for reader in self._readers if (view := reader.read())}
        if self._hosts is not None:
            self._show(views)
            if not self._hosts.judges:
                return
            views |= {
                rank: RankView.from_json(values) for rank, values in self._hosts.others().items()
            }
        usual = self._usual
        usual.learn(views, time.monotonic())
        hang = (
            mismatch(views)
            or diagnose(views, partial(usual.wait_limit_s, views))
            or resting(views, usual.rest_limit_s, usual.longest_rest_s)
        )
        if hang is None:
            if self._told:
                self._say("the ranks go on")
            self._told = ()
        elif hang.key != self._told:
            self._told = hang.key
            self._report(replace(hang, views=self._with_stacks(hang)))

    def _report(self, hang: Hang) -> None:
        self._say(hang.sentence())
        told = {rank: view.flight for rank, view in hang.views.items() if view.flight}
        here = ask_flights({reader.rank: reader.path for reader in self._readers})
        flights = compare(dict(sorted({**told, **here}.items())))
        for line in flights:
            self._say(f"flight recorder: {line}")
        for rank in hang.culprits:
            stack = hang.views[rank].stack
            if stack:
                lines = stack.strip().splitlines()
                more = [f"... {len(lines) - SHOWN_LINES} more lines"] * (len(lines) > SHOWN_LINES)
                shown = "\n".join(f"  {line}" for line in [*lines[:SHOWN_LINES], *more])
                self._say(f"stacks of rank {rank} on {hang.views[rank].host}:\n{shown}")
        self._write(hang, flights)
        if self._stops and hang.kind != REST:
            self.hang = hang

    def _write(self, hang: Hang, flights: Sequence[str]) -> None:
        if self._folder is None:
            return
        names = (self._folder / f"hang-{number}.json" for number in itertools.count(1))
        path = next(name for name in names if not name.exists())  # earlier ones stay
        facts = {"time": time.time(), **hang.to_json(), "flight_recorder": list(flights)}
        try:
            path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self._say(f"cannot write {path}: {error.strerror}")

    def _with_stacks(self, hang: Hang) -> dict[int, RankView]:
        """Return the states with the stacks of the ranks here that matter."""
        wanted = {*hang.culprits, *hang.waiting[:1]}
        views = dict(hang.views)
        for reader in self._readers:
            if reader.rank in wanted:
                stack = ask(reader.pid, reader.path.with_suffix(STACKS))
                views[reader.rank] = replace(views[reader.rank], stack=stack)
        return views

    def _show(self, views: Mapping[int, RankView]) -> None:
        """Show the ranks here to host 0, with stacks and collectives where a rank stands still."""
        now = time.monotonic()
        if self._hosts is None or now - self._shown < SHOW_S:
            return
        self._shown = now
        shown = []
        for reader in self._readers:
            view = views.get(reader.rank)
            if view is None:
                continue
            if view.still_s >= SHORTEST_S / 2 and not view.state:
                view = self._with_answers(reader, view, now - view.still_s)
            shown.append(view.to_json())
        self._hosts.show(shown)

    def _with_answers(self, reader: BoardReader, view: RankView, since: float) -> RankView:
        """Return the state with stacks and collectives, for which a rank is asked once a rest."""
        at, answered = self._asked.get(view.rank, (0.0, view))
        if abs(at - since) > PERIOD_S:
            stack = ask(reader.pid, reader.path.with_suffix(STACKS))
            flights = ask_flights({view.rank: reader.path})
            flight = newest(flights[view.rank]) if flights else {}
            answered = replace(view, stack=stack, flight=flight)
            self._asked[view.rank] = since, answered
        return replace(view, stack=answered.stack, flight=answered.flight)


# --- stragglers of an attempt ---

LOOKS_IN_WINDOW = 4
"""Looks at the files in the time after which ranks write them again."""


def work_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's times in the private folder of an attempt."""
    return folder / f"rank-{rank}.work.json"


class WorkFiles:
    """The files of this host's ranks in one attempt.

    Args:
        folder: where they lie.
        ranks: the numbers of the ranks.
        every_s: seconds after which ranks write again; 0: they write nothing.
    """

    def __init__(self, folder: Path, ranks: Iterable[int], every_s: float) -> None:
        self._paths = {rank: work_file(folder, rank) for rank in ranks}
        self._pause = every_s / LOOKS_IN_WINDOW
        self._seen: dict[int, int] = {}
        self._next = time.monotonic() + self._pause if every_s else float("inf")

    def read(self) -> list[RankTimes]:
        """Return the times that ranks have written since the last look, now and then."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + self._pause
        found = []
        for rank, path in self._paths.items():
            work = read_work(path)
            if work is not None and work.window != self._seen.get(rank):
                self._seen[rank] = work.window
                found.append(work)
        return found


# --- compares the times of all ranks of an attempt, and names each straggler once ---


class StragglerWatch:
    """Names ranks and hosts that are slower than the others in two comparisons in a row.

    One slow window may have a cause that passes: a page cache fills, another job ends. A rank that
    is slow in two windows in a row needs a look.

    Args:
        margin: how much longer than the others' a rank's work must take.
        say: shows a line.
    """

    def __init__(self, margin: float, say: Callable[[str], None]) -> None:
        self._margin, self._say = margin, say
        self._begin(0)

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._works: dict[int, RankTimes] = {}
        self._before: set[tuple[int, ...]] = set()
        self._named: set[int] = set()

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take the message of a launcher: plain values of ``works``, ``size`` and ``attempt``."""
        works = (RankTimes(**values) for values in message["works"])
        self.take(works, message["size"], message["attempt"])

    def take(self, works: Iterable[RankTimes], size: int, attempt: int = 0) -> None:
        """Add the newest times of some ranks; name each straggler that is to be named now.

        Ranks are compared as soon as there are new times of all of them. A new attempt begins anew.

        Args:
            works: the times.
            size: number of all ranks.
            attempt: number of the attempt.
        """
        if attempt != self._attempt:
            self._begin(attempt)
        for work in works:
            self._works[work.rank] = work
        if len(self._works) < size:
            return
        found = stragglers(self._works.values(), self._margin)
        self._works = {}
        due = [each for each in found if self._is_due(each)]
        self._before = {each.ranks for each in found}
        for each in due:
            self._named.update(each.ranks)
            self._say(str(each))

    def _is_due(self, straggler: Straggler) -> bool:
        return straggler.ranks in self._before and not self._named.issuperset(straggler.ranks)
