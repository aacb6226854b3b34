"""Ranks tell each other facts: they meet first, so that a rank that is alone learns why.

Before ranks exchange values, eight bytes of each rank, a digest, tell whether all mean the same.
Ranks in different operations, or with data of other shapes, exchange the whole texts then, and all
of them raise the same error. The digests are also where ranks meet: a rank that comes alone learns
which rank is missing, and why. Facts are the run's own words and no pickles. Objects of a script
are another matter: ``communication.gather_object`` takes any of them.

Ranks meet before they exchange something: a rank that is alone there learns soon why.

A wait for other ranks looks around after half a second, and then ever more rarely: it leaves a
status in the store where the ranks met, and reads the statuses of the others. Statuses prove that a
wait is in
vain: each of two ranks waits for an operation that the other one has not begun, a rank has ended
without beginning the operation that this one waits for, or two ranks have different operations
under way at the same place of one order. Nothing is looked at before that half second.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias, TypeVar, get_args, get_origin
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from drivetrain.collectives.communicator import Header, disagreement, reason
from drivetrain.collectives.neighbors import Tag
from drivetrain.errors import CollectiveError, RankMismatchError, UsageError
from drivetrain.runtime.board import BoardRow, board
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import (
    RankStatus,
    begin_meeting,
    gather_texts,
    has_left,
    reached,
    running,
    set_status,
    share_text,
    status_of,
)

# --- ranks meet before they exchange something ---

FIRST_LOOK_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds before a wait looks around for the first time, and the longest pause between two looks.
Up to that, a wait looks again when it has taken twice as long."""

POLL_SHARE, SHORTEST_POLL_S, LONGEST_POLL_S = 0.1, 2e-5, 0.05
"""A meeting is polled after pauses of this share of the time it has taken."""


WAY_OUT = (
    "every rank must come to each collective, in the same order: look for a condition around one, "
    "such as 'if accelerator.is_main_process:', or a loop with fewer rounds"
)


@dataclass(eq=False)
class Wait:
    """One wait of this rank for others.

    Args:
        doing: the operation in words, for messages.
        place: the order that the operation belongs to, the same name on all ranks.
        number: which one of that order, from 1.
        ranks: the global ranks whose statuses are read.
        rank: this one.
        needed: those of the ranks that must come.

    Attributes:
        spoken_for: whether another thread looks around in place of the main thread, which cannot.
    """

    spoken_for = False

    doing: str
    place: str
    number: int
    ranks: Sequence[int]
    rank: int
    needed: Sequence[int]
    site: str = ""
    _next: float = field(default_factory=lambda: FIRST_LOOK_S)
    _spoke: bool = False

    def look(self, waited: float) -> str:
        """Look around if it is time to.

        Args:
            waited: seconds since the wait began.

        Returns:
            Why the wait is in vain, "" while nothing proves that.
        """
        # The store has one status per rank, about the main thread: other threads leave none.
        main = self.spoken_for or threading.current_thread() is threading.main_thread()
        if waited < self._next or not main:
            return ""
        self._next = waited + min(waited, LONGEST_PAUSE_S)
        self.site = script_line(main=True)
        set_status(self._status())
        self._spoke = True
        try:
            statuses = self._statuses()
        except RuntimeError:  # the store's own rank has ended: the wait will fail by itself
            return ""
        if found := self._disagreement(statuses):
            return found
        in_vain = {rank: status for rank, status in statuses.items() if self._in_vain(rank, status)}
        return self._explain(in_vain, f"waited {waited:.1f} s in vain") if in_vain else ""

    def over(self) -> None:
        """Take the status back."""
        if self._spoke:
            set_status(None)

    def failed(self, error: BaseException) -> str:
        """Return the message of a failure, with the statuses of the ranks that are missing."""
        found = reason(error)
        try:
            statuses = self._statuses()
        except RuntimeError:
            gone = "the rank that keeps the statuses of all ranks, rank 0, has ended"
            return f"{self.doing} on rank {self.rank} failed: {gone} ({found}); {WAY_OUT}"
        missing = {rank: status for rank, status in statuses.items() if self._is_missing(status)}
        return self._explain(missing, f"failed ({found})")

    def late(self, waited: float) -> str:
        """Return the message of a wait that took too long."""
        return f"{self.doing} on rank {self.rank} waited {waited:.1f} s: {self.missing()}"

    def missing(self) -> str:
        """Return the statuses of the ranks that have not begun the operation, in one sentence."""
        with suppress(RuntimeError):
            statuses = self._statuses()
            if found := self._disagreement(statuses):
                return found
            known = {
                rank: status
                for rank, status in statuses.items()
                if status is not None and status.lacks(self.place, self.number)
            }
            if known:
                return f"{_said(known)}; {WAY_OUT}"
        return "look for the rank that failed first, or that does not answer"

    def _is_missing(self, status: RankStatus | None) -> bool:
        return status is None or status.lacks(self.place, self.number) or not status.doing

    def _in_vain(self, rank: int, status: RankStatus | None) -> bool:
        """Whether a rank will not come to this operation, as its status proves."""
        if status is None or rank not in self.needed or not status.lacks(self.place, self.number):
            return False
        if not status.doing:
            return True
        mine = reached().get(status.place, 0)
        return self.rank in status.ranks and mine < status.number

    def _disagreement(self, statuses: Mapping[int, RankStatus | None]) -> str:
        """Return the difference between two operations with one number, "" where there is none."""
        mine = {place: Header.from_json(facts) for place, facts in running().items()}
        for rank, status in statuses.items():
            for place in mine.keys() & (status.running.keys() if status else ()):
                theirs = Header.from_json(status.running[place]) if status else mine[place]
                if theirs.number == mine[place].number and mine[place].differences(theirs):
                    sites = (self.site or script_line(main=True), status.site if status else "")
                    ranks = (self.rank, rank)
                    return str(disagreement(mine[place], theirs, sites, ranks))
        return ""

    def _explain(self, missing: Mapping[int, RankStatus | None], what: str) -> str:
        who = _said(missing) or "all other ranks came"
        here = f" at {self.site}" if self.site else ""
        return f"{self.doing} on rank {self.rank}{here} {what}: {who}; {WAY_OUT}"

    def _status(self) -> RankStatus:
        return RankStatus(
            doing=self.doing,
            place=self.place,
            number=self.number,
            ranks=list(self.needed),
            reached=reached(),
            running=running(),
            site=self.site,
        )

    def _statuses(self) -> dict[int, RankStatus | None]:
        return {rank: status_of(rank) for rank in self.ranks if rank != self.rank}


def _said(statuses: Mapping[int, RankStatus | None]) -> str:
    """Return the words of ranks in one sentence."""
    return ", and ".join(
        f"rank {rank} {status or 'says nothing: it computes, or was killed'}"
        for rank, status in sorted(statuses.items())
    )


_rows: WeakKeyDictionary[dist.ProcessGroup, BoardRow] = WeakKeyDictionary()
"""The rows of meetings on this process's board, while their groups live."""


def _row_of(group: dist.ProcessGroup, ranks: Sequence[int]) -> BoardRow:
    row = _rows.get(group)
    if row is None:
        row = _rows[group] = board.open(str(group.group_name), ranks)
        finalize(group, row.close)
    return row


by_itself: ContextVar[bool] = ContextVar("by_itself", default=False)
"""Whether this rank computes something that the others may not: it must meet none of them."""


@contextmanager
def named(doing: str, group: dist.ProcessGroup | None = None) -> Iterator[Wait]:
    """Context of a collective of the backend: its failure says which ranks are missing.

    Args:
        doing: the operation in words.
        group: of the ranks; None means all.

    Raises:
        CollectiveError: the backend reports a failure.
        UsageError: within a function that this rank may call more often than others.
    """
    if by_itself.get():
        raise UsageError(
            f"expected no collective but backward() in a function of each_piece(), found {doing}: "
            "a rank may call the function more often than others; move it behind each_piece()"
        )
    group = group or dist.group.WORLD
    if group is None:
        raise CollectiveError(f"{doing}: this rank has left the process group of the others")
    ranks, rank, number = dist.get_process_group_ranks(group), dist.get_rank(), begin_meeting(group)
    wait = Wait(doing, str(group.group_name), number, ranks, rank, ranks)
    row = _row_of(group, ranks)
    row.submit(number)
    row.begin(number, 0, "", 0, "", doing)
    try:
        yield wait
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveError(wait.failed(error)) from error
    row.end()
    wait.over()


def meet(
    work: Any,
    wait: Wait,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Wait for a small collective that no rank completes alone.

    Args:
        work: the backend's handle.
        wait: from ``named``.
        group: of the ranks; None means all.
        timeout: of the wait; None leaves it to the group, whose own may be longer.

    Raises:
        CollectiveError: ranks will not come, as their statuses prove, or did not come in time.
    """
    start = time.monotonic()
    while not work.is_completed():
        waited = time.monotonic() - start
        why = wait.look(waited)
        if not why and timeout is not None and waited > timeout.total_seconds():
            why = wait.late(waited)
        if why:
            _let_fail(group)
            raise CollectiveError(why)
        time.sleep(min(max(POLL_SHARE * waited, SHORTEST_POLL_S), LONGEST_POLL_S))
    work.wait()


def _let_fail(group: dist.ProcessGroup | None) -> None:
    """End a collective that nobody completes: its threads would keep the process from ending.

    gloo closes all connections of a group when one wait times out: so let one time out. Other
    backends have a watchdog of their own.
    """
    chosen = group or dist.group.WORLD
    if chosen is None or "gloo" not in str(dist.get_backend(chosen)):
        return
    token = torch.empty(1, dtype=torch.uint8, device="cpu")
    neighbor = (dist.get_rank(chosen) + 1) % dist.get_world_size(chosen)
    try:
        chosen.recv([token], neighbor, Tag.ALARM).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


# --- finds the line of the user's script that a thread is at, behind the frames of libraries ---


_LIBRARIES = frozenset(
    {"drivetrain", "torch", "contextlib", "threading", "concurrent", "functools", "accelerate"}
)
"""Top-level modules that are not the script."""


def script_line(*, main: bool = False) -> str:
    """Return ``file:line`` of the innermost frame of the script, "" without one.

    Args:
        main: look at the main thread, whichever thread this is.
    """
    frame: FrameType | None = sys._getframe(1)
    if main:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top not in _LIBRARIES and not top.startswith("drivetrain_"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# --- ranks tell each other facts ---

Ranks: TypeAlias = dist.ProcessGroup | Axis | None
"""Who takes part: a process group, a line of the mesh, or None for all ranks."""

_SHOWN_CHARACTERS, _SHOWN_KINDS = 300, 8
"""Characters of a description in a message, and the number of different descriptions."""


def meet_everyone(operation: str, group: Ranks = None, *, doing: str = "", data: str = "") -> None:
    """Return when every rank has come to the same operation. Collective.

    Args:
        operation: the operation, the same text on all ranks.
        group: the ranks, as a process group or a line of the mesh; None means all.
        doing: the reason in words, where ranks may word it differently.
        data: structure, shapes and dtypes, equal on all ranks.

    Raises:
        CollectiveError: a rank does not come, or came to another operation.
        RankMismatchError: the data differ.
    """
    if size_of(group) == 1:
        return
    held = differing((operation, data), group, doing=doing or operation, notes=(script_line(),))
    if held:
        _refuse(operation, held)


def counts_of_everyone(
    operation: str, data: str, counts: Sequence[int], refusal: str, group: Ranks
) -> Sequence[Sequence[int]]:
    """Return the counts of all ranks, which have come to the same operation. Collective.

    Args:
        operation: the operation, the same text on all ranks.
        data: structure, shapes and dtypes, equal on all ranks.
        counts: may differ between ranks.
        refusal: why this rank cannot take part.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come, or came to another operation.
        RankMismatchError: the data differ.
        UsageError: a rank cannot take part.
    """
    facts = (operation, data, json.dumps(counts), refusal)
    held = differing(facts, group, doing=operation, notes=(script_line(),))
    if len({tuple(each[:2]) for each in held}) > 1:
        _refuse(operation, [(*each[:2], each[-1]) for each in held])
    held = held or [facts] * size_of(group)
    if found := next((each[3] for each in held if each[3]), ""):
        raise UsageError(found)
    return [json.loads(each[2]) for each in held]


def differing(
    facts: Sequence[str],
    group: Ranks = None,
    *,
    doing: str = "the comparison of ranks",
    notes: Sequence[str] = (),
) -> list[Sequence[str]]:
    """Return the facts of all ranks if ranks differ, else an empty list. Collective.

    A digest of eight bytes goes first: only ranks that disagree exchange the whole text.

    Args:
        facts: texts that should be equal on all ranks.
        group: the ranks, as a process group or a line of the mesh; None means all.
        doing: the reason of the comparison, for the message of an error.
        notes: texts that may differ; they follow the facts of a rank.

    Raises:
        CollectiveError: a rank does not come; the message says which, and what it did last.
    """
    if size_of(group) == 1:
        return []
    digest = hashlib.sha256("\0".join(facts).encode()).digest()[:8]
    number = int.from_bytes(digest, "big", signed=True)
    mine = torch.tensor([number], dtype=torch.int64, device=device_of(group))
    digests = mine.new_empty(size_of(group), 1)
    ranks = group_of(group)
    with named(doing, ranks) as wait:
        meet(dist.all_gather(list(digests.unbind()), mine, group=ranks, async_op=True), wait, ranks)
    if len(set(digests.flatten().tolist())) == 1:
        return []
    return _texts((*facts, *notes), group, doing)


def refuse_other_operation(operation: str, group: Ranks, doing: str) -> NoReturn:
    """Exchange texts with ranks in other operations, and raise. Collective.

    Raises:
        CollectiveError: names the operations of all ranks.
    """
    _refuse(operation, _texts((operation, "", script_line()), group, doing))


def _texts(texts: Sequence[str], group: Ranks, doing: str) -> list[Sequence[str]]:
    """Return the texts of all ranks. Collective."""
    ranks, size, mine = group_of(group), size_of(group), json.dumps(texts)
    with named(doing, ranks):
        return [
            [str(each) for each in json.loads(held)]
            for held in gather_texts(mine, size, group=ranks, device=device_of(group))
        ]


def group_of(ranks: Ranks) -> dist.ProcessGroup | None:
    """Return the process group of some ranks, None for the default one."""
    return ranks.group if isinstance(ranks, Axis) else ranks


def size_of(group: Ranks) -> int:
    """Return how many ranks take part; 1 without a process group.

    Raises:
        UsageError: the ranks have parted: the local value would pass for that of all.
    """
    if has_left():
        raise UsageError(
            "expected all that ranks do together before end_training(), found an exchange of "
            "values after it: this rank has left the others"
        )
    if isinstance(group, Axis):
        return group.size
    return (
        dist.get_world_size(group_of(group)) if dist.is_available() and dist.is_initialized() else 1
    )


def device_of(group: Ranks, wish: torch.device | None = None) -> torch.device | None:
    """Return the wished device if the group can communicate from there, else another."""
    if size_of(group) == 1:
        return wish
    able = [pair.split(":")[0] for pair in dist.get_backend_config(group_of(group)).split(",")]
    if wish is not None and wish.type in able:
        return wish
    accelerator = torch.accelerator.current_accelerator()
    if "cpu" in able or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _refuse(operation: str, held: list[Sequence[str]]) -> NoReturn:
    """Raise the error about ranks with other data, or in other operations.

    Args:
        operation: of this rank.
        held: operation, data and line of the script of each rank.
    """
    if len({each for each, *_ in held}) == 1:
        raise RankMismatchError(
            f"{operation} expected the same operation, structure, shapes and dtypes on all ranks, "
            f"found {_grouped([data for _, data, *_ in held])}; pad with pad_across_processes "
            "first, or use gather_object"
        )
    texts = [
        f"{each}{f' of {data}' if data else ''}{f' at {site}' if site else ''}"
        for each, data, site, *_ in held
    ]
    raise CollectiveError(f"ranks came to different collectives: {_grouped(texts)}; {WAY_OUT}")


def _grouped(held: list[str]) -> str:
    """Return the ranks of each text; long ones from shortly before their first difference."""
    letters = enumerate(zip(*held, strict=False))
    difference = next((i for i, each in letters if len(set(each)) > 1), 0)
    start = max(0, difference - _SHOWN_CHARACTERS // 2)
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(held):
        ranks.setdefault(text, []).append(str(rank))
    shown = [
        f"{'rank' if len(where) == 1 else 'ranks'} {', '.join(where)}: "
        f"{'...' * (start > 0)}{text[start:][:_SHOWN_CHARACTERS]}"
        for text, where in list(ranks.items())[:_SHOWN_KINDS]
    ]
    return "; ".join([*shown, "..."] if len(ranks) > _SHOWN_KINDS else shown)


# --- facts ---


FactsT = TypeVar("FactsT")


def gather_facts(
    facts: FactsT,
    kind: type[FactsT],
    *,
    doing: str,
    operation: str = "",
    group: Ranks = None,
    main_only: bool = False,
) -> list[FactsT]:
    """Return the facts of all ranks, by rank; every rank receives them. Collective.

    Args:
        facts: plain values, or a dataclass of plain values.
        kind: their type.
        doing: the reason of the exchange in words.
        operation: the name of the exchange, the same on all ranks; "" means ``doing``.
        group: the ranks, as a process group or a line of the mesh; None means all.
        main_only: for facts that are too large to be received by every rank: the global rank 0
            alone receives and reads them, and the list is empty elsewhere.

    Raises:
        CollectiveError: a rank does not come, or sent facts of another type.
    """
    if size_of(group) == 1:
        return [facts]
    with _met(doing, operation, group) as (ranks, device):
        mine, size = _written(facts), size_of(group)
        texts = gather_texts(mine, size, group=ranks, device=device, main_only=main_only)
    return [_read(text, kind, doing, rank) for rank, text in enumerate(texts)]


def share_facts(
    facts: FactsT, kind: type[FactsT], *, doing: str, operation: str = "", group: Ranks = None
) -> FactsT:
    """Return the facts of global rank 0 on every rank. Collective.

    Args:
        facts: plain values, or a dataclass of plain values; only those of rank 0 count.
        kind: their type.
        doing: the reason of the exchange in words.
        operation: the name of the exchange, the same on all ranks; "" means ``doing``.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come, or rank 0 sent facts of another type.
    """
    if size_of(group) == 1:
        return facts
    mine = _written(facts) if dist.get_rank() == 0 else ""
    with _met(doing, operation, group) as (ranks, device):
        text = share_text(mine, group=ranks, device=device)
    return _read(text, kind, doing, 0)


@contextmanager
def _met(
    doing: str, operation: str, group: Ranks
) -> Iterator[tuple[dist.ProcessGroup | None, torch.device | None]]:
    """Context that all ranks enter together; a rank alone learns which rank is missing.

    Yields:
        The process group of the ranks, and a device from which they can communicate.
    """
    meet_everyone(operation or doing, group, doing=doing)
    ranks = group_of(group)
    with named(doing, ranks):
        yield ranks, device_of(group)


def _written(facts: Any) -> str:
    return json.dumps(facts, default=asdict)


def _read(text: str, kind: type[FactsT], doing: str, rank: int) -> FactsT:
    with suppress(ValueError):
        value: Any = json.loads(text)
        if _is_plain(kind, value):
            return value  # type: ignore[no-any-return]
    from pydantic import TypeAdapter, ValidationError  # slow to load: ordinary runs do without

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise CollectiveError(
            f"{doing}: expected facts of rank {rank} that all ranks understand, found others "
            f"({error.errors()[0]['msg']}); start the same version on every host"
        ) from error


def _is_plain(kind: Any, value: Any) -> bool:
    """Whether a value has a type that JSON itself knows: texts, numbers, lists and mappings."""
    inner = get_args(kind)
    if get_origin(kind) is list:
        return type(value) is list and all(_is_plain(inner[0], each) for each in value)
    if get_origin(kind) is dict and inner[0] is str:
        return type(value) is dict and all(_is_plain(inner[1], each) for each in value.values())
    return kind in (str, int, float, bool) and type(value) is kind
