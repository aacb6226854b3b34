"""Ranks meet before they exchange something: a rank that is alone there learns soon why.

A wait for other ranks looks around after half a second, and then ever more rarely: it leaves a word
in the store where the ranks met, and reads the words of the others. Words prove that a wait is in
vain: each of two ranks waits for an operation that the other one has not begun, a rank has ended
without beginning the operation that this one waits for, or two ranks have different operations
under way at the same place of one order. Nothing is looked at before that half second.
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from drivetrain.collectives.communicator import reason
from drivetrain.collectives.neighbors import Header, Tag, disagreement
from drivetrain.errors import CollectiveError
from drivetrain.runtime.board import BoardRow, board
from drivetrain.runtime.words import Word, begin_meeting, heard, reached, running, say

FIRST_LOOK_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds before a wait looks around for the first time, and the longest pause between two looks.
Up to that, a wait looks again when it has taken twice as long."""

POLL_SHARE, SHORTEST_POLL_S, LONGEST_POLL_S = 0.1, 2e-5, 0.05
"""A meeting is polled after pauses of this share of the time it has taken."""


WAY_OUT = (
    "every rank must come to each collective, in the same order: look for a condition around one, "
    "such as 'if accelerator.is_main_process:', or a loop with fewer rounds"
)


class Wait:
    """One wait of this rank for others.

    Args:
        doing: the operation in words, for messages.
        place: the order that the operation belongs to, the same name on all ranks.
        number: which one of that order, from 1.
        ranks: the global ranks whose words are read.
        rank: this one.
        needed: those of the ranks that must come; None means all.
    """

    def __init__(
        self,
        doing: str,
        place: str,
        number: int,
        ranks: Sequence[int],
        rank: int,
        needed: Sequence[int] | None = None,
    ) -> None:
        self.doing = doing
        self.place = place
        self.number = number
        self.ranks = ranks
        self.rank = rank
        self.needed = ranks if needed is None else needed
        self.site = ""
        self._next = FIRST_LOOK_S
        self._spoke = False

    def look(self, waited: float) -> str:
        """Look around if it is time to.

        Args:
            waited: seconds since the wait began.

        Returns:
            Why the wait is in vain, "" while nothing proves that.
        """
        # The store has one word per rank, about the main thread: other threads leave none.
        if waited < self._next or threading.current_thread() is not threading.main_thread():
            return ""
        self._next = waited + min(waited, LONGEST_PAUSE_S)
        self.site = script_line()
        say(self._word())
        self._spoke = True
        try:
            words = self._words()
        except RuntimeError:  # the store's own rank has ended: the wait will fail by itself
            return ""
        if found := self._disagreement(words):
            return found
        in_vain = {rank: word for rank, word in words.items() if self._in_vain(rank, word)}
        return self._explain(in_vain, f"waited {waited:.1f} s in vain") if in_vain else ""

    def over(self) -> None:
        """Take the word back."""
        if self._spoke:
            say(None)

    def failed(self, error: BaseException) -> str:
        """Return the message of a failure, with the words of the ranks that are missing."""
        found = reason(error)
        try:
            words = self._words()
        except RuntimeError:
            gone = "the rank that keeps the words of all ranks, rank 0, has ended"
            return f"{self.doing} on rank {self.rank} failed: {gone} ({found}); {WAY_OUT}"
        missing = {rank: word for rank, word in words.items() if self._is_missing(word)}
        return self._explain(missing, f"failed ({found})")

    def late(self, waited: float) -> str:
        """Return the message of a wait that took too long."""
        return f"{self.doing} on rank {self.rank} waited {waited:.1f} s: {self.missing()}"

    def missing(self) -> str:
        """Return the words of the ranks that have not begun the operation, in one sentence."""
        with suppress(RuntimeError):
            words = self._words()
            if found := self._disagreement(words):
                return found
            known = {
                rank: word
                for rank, word in words.items()
                if word is not None and word.lacks(self.place, self.number)
            }
            if known:
                return f"{_said(known)}; {WAY_OUT}"
        return "look for the rank that failed first, or that does not answer"

    def _is_missing(self, word: Word | None) -> bool:
        return word is None or word.lacks(self.place, self.number) or not word.doing

    def _in_vain(self, rank: int, word: Word | None) -> bool:
        """Whether a rank will not come to this operation, as its word proves."""
        if word is None or rank not in self.needed or not word.lacks(self.place, self.number):
            return False
        if not word.doing:
            return True
        mine = reached().get(word.place, 0)
        return self.rank in word.ranks and mine < word.number

    def _disagreement(self, words: Mapping[int, Word | None]) -> str:
        """Return the difference between two operations with one number, "" where there is none."""
        mine = {place: Header.from_json(facts) for place, facts in running().items()}
        for rank, word in words.items():
            for place in mine.keys() & (word.running.keys() if word else ()):
                theirs = Header.from_json(word.running[place]) if word else mine[place]
                if theirs.number == mine[place].number and mine[place].differences(theirs):
                    sites = (self.site or script_line(main=True), word.site if word else "")
                    ranks = (self.rank, rank)
                    return str(disagreement(mine[place], theirs, sites, ranks))
        return ""

    def _explain(self, missing: Mapping[int, Word | None], what: str) -> str:
        who = _said(missing) or "all other ranks came"
        here = f" at {self.site}" if self.site else ""
        return f"{self.doing} on rank {self.rank}{here} {what}: {who}; {WAY_OUT}"

    def _word(self) -> Word:
        return Word(
            doing=self.doing,
            place=self.place,
            number=self.number,
            ranks=list(self.needed),
            reached=reached(),
            running=running(),
            site=self.site,
        )

    def _words(self) -> dict[int, Word | None]:
        return {rank: heard(rank) for rank in self.ranks if rank != self.rank}


def _said(words: Mapping[int, Word | None]) -> str:
    """Return the words of ranks in one sentence."""
    return ", and ".join(
        f"rank {rank} {word or 'says nothing: it computes, or was killed'}"
        for rank, word in sorted(words.items())
    )


_rows: WeakKeyDictionary[dist.ProcessGroup, BoardRow] = WeakKeyDictionary()
"""The rows of meetings on this process's board, while their groups live."""


def _row_of(group: dist.ProcessGroup, ranks: Sequence[int]) -> BoardRow:
    row = _rows.get(group)
    if row is None:
        row = _rows[group] = board.open(str(group.group_name), ranks)
        finalize(group, row.close)
    return row


@contextmanager
def named(doing: str, group: dist.ProcessGroup | None = None) -> Iterator[Wait]:
    """Context of a collective of the backend: its failure says which ranks are missing.

    Args:
        doing: the operation in words.
        group: of the ranks; None means all.

    Raises:
        CollectiveError: the backend reports a failure.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise CollectiveError(f"{doing}: this rank has left the process group of the others")
    ranks, rank, number = dist.get_process_group_ranks(group), dist.get_rank(), begin_meeting(group)
    wait = Wait(doing, str(group.group_name), number, ranks, rank)
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
        CollectiveError: ranks will not come, as their words prove, or did not come in time.
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
