"""The watch over the ranks of one attempt: who stands still, who is slow, who waits for whom.

A wait of several times the usual length is a hang: it is said in one sentence, with the stacks of
whoever keeps others waiting, and written to a file beside the logs. So is a long rest of ranks for
which nobody waits; only a hang may end the run. Over several hosts each launcher shows its ranks to
host 0, which judges.

Stragglers of an attempt: the times of all ranks, read from their files, and compared.

Who keeps whom waiting, from the states of all ranks: one sentence, and plain values.

A rank waits in an operation for as long as it is under way. Whoever has not handed over the
operation of that number is absent; whoever has another one under its number mismatches; whoever a
signal has stopped is stopped, wherever that happened. A rank rests while nothing on its board
changes, and nobody need wait for it. What lasts several times the longest of before is unusual, and
worth a line.
"""

import itertools
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from drivetrain.observe.figures import RankTimes, read_work, stragglers
from drivetrain.runtime.board import DRAWING, NATIVE, OperationView
from drivetrain_launch.console import runs
from drivetrain_launch.ranks.answers import (
    STACKS,
    BoardReader,
    RankView,
    ask,
    ask_flights,
    compare,
    main_thread,
    newest,
    script_site,
)

# --- who keeps whom waiting, from the states of all ranks ---

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
        if not view.state and (operation := view.longest(limit_s)) is not None
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
    shown: list[str] = []
    for run in runs(ranks):
        shown += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    joined = ", ".join(shown[:-1]) + (" and " if shown[:-1] else "") + shown[-1]
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
        if view.still_s >= limit_s
        and trains(view)
        and view.state != "ended"
        and view.section != DRAWING
    ]
    if not found:
        return None
    return Hang(kind=REST, culprits=found, usual_s=usual_s, views=views)


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
        readers: of the boards of the ranks here.
        hosts: the other launchers; None on one host.
        stops: whether a hang ends the run.
        folder: for the file about a hang, or None.
        say: shows a line to the user.

    Attributes:
        hang: the hang that shall end the run, if any.
    """

    def __init__(
        self,
        readers: Sequence[BoardReader],
        *,
        hosts: Hosts | None = None,
        stops: bool = False,
        folder: Path | None = None,
        say: Callable[[str], None],
    ) -> None:
        self._readers, self._hosts = readers, hosts
        self._stops, self._folder, self._say = stops, folder, say
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
        due = [
            each
            for each in found
            if each.ranks in self._before and not self._named.issuperset(each.ranks)
        ]
        self._before = {each.ranks for each in found}
        for each in due:
            self._named.update(each.ranks)
            self._say(str(each))
