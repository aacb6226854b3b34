"""torch's flight recorder: which collectives of a device each rank has enqueued, and finished.

A rank answers a line in a named pipe, on a thread that sleeps until then, with the recorder's own
JSON in a file. On NCCL this tells ranks apart whose hosts have all gone on. Entries are compared by
process group and sequence number, by ``retired`` and not by ``state``, which gloo leaves alone.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
VARIABLES = {RECORDER_VARIABLE: "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
"""Environment variables that switch the recorder on, by its newer and its older name."""

ASK, FLIGHT = ".ask", ".flight.json"
"""Suffixes of the pipe and of the answer, beside a rank's board."""

NEWEST = 20
"""Collectives of each process group that a launcher tells host 0."""

ANSWER_S, LOOK_S = 2.0, 0.02
"""How long ranks may take to answer, and the pause between looks for the answer."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One collective of one rank.

    Attributes:
        name: the backend and the operation, as in ``nccl:all_reduce``.
        sizes: shapes of its inputs.
        over: whether the rank's device has finished it.
    """

    name: str
    sizes: tuple[tuple[int, ...], ...]
    over: bool

    def is_like(self, other: "Recorded") -> bool:
        """Whether two ranks enqueued the same."""
        return (self.name, self.sizes) == (other.name, other.sizes)

    def __str__(self) -> str:
        return f"{self.name} of {' and '.join(str(size) for size in self.sizes) or 'nothing'}"


Flight = Mapping[str, Mapping[int, Recorded]]
"""The collectives of one rank by process group and sequence number."""


def read_flight(text: str | bytes) -> Flight:
    """Read the JSON of one rank's recorder.

    Raises:
        ValueError: the text is no such JSON.
    """
    flight: dict[str, dict[int, Recorded]] = {}
    try:
        for entry in json.loads(text)["entries"]:
            if not entry["is_p2p"]:
                group = " ".join(dict.fromkeys(entry["process_group"]))
                flight.setdefault(group, {})[int(entry["collective_seq_id"])] = _recorded(entry)
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected the JSON of torch's flight recorder: {error!r}") from error
    return flight


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    sizes = tuple(tuple(int(each) for each in size) for size in entry["input_sizes"])
    over = bool(entry["retired"]) or entry["state"] == "completed"
    return Recorded(entry["profiling_name"], sizes, over)


def newest(flight: Flight) -> dict[str, list[Any]]:
    """Return the last collectives of each group as plain values: number, name, sizes, over."""
    return {
        group: [
            [number, found.name, found.sizes, found.over]
            for number, found in sorted(entries.items())[-NEWEST:]
        ]
        for group, entries in flight.items()
    }


def from_newest(values: Mapping[str, Sequence[Any]]) -> Flight:
    """Return the collectives that ``newest`` has made plain."""
    return {
        group: {
            int(number): Recorded(str(name), tuple(map(tuple, sizes)), bool(over))
            for number, name, sizes, over in entries
        }
        for group, entries in values.items()
    }


def compare(flights: Mapping[int, Flight]) -> list[str]:
    """Return a sentence about each process group in which ranks differ, or do not get on.

    Args:
        flights: by global rank.
    """
    groups = dict.fromkeys(group for flight in flights.values() for group in flight)
    sentences = (_compared(group, flights) for group in groups)
    return [sentence for sentence in sentences if sentence]


def _compared(group: str, flights: Mapping[int, Flight]) -> str:
    ranks = {rank: flight[group] for rank, flight in flights.items() if group in flight}
    open_numbers = [
        number for each in ranks.values() for number, found in each.items() if not found.over
    ]
    if not open_numbers:
        return ""
    number = min(open_numbers)
    there = {rank: each[number] for rank, each in ranks.items() if number in each}
    absent = [rank for rank, each in ranks.items() if max(each) < number]
    expected = next(found for found in there.values() if not found.over)
    what = f"collective {number} of group {group!r}, {expected}"
    if absent:
        return f"{_listed(absent)} did not enqueue {what}"
    odd = [rank for rank, found in there.items() if not found.is_like(expected)]
    if odd:
        return f"{_listed(odd)} enqueued {there[odd[0]]} where others enqueued {what}"
    late = [rank for rank, found in there.items() if not found.over]
    return f"{_listed(late)}: the device has not finished {what}"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def ask_flights(boards: Mapping[int, Path]) -> dict[int, Flight]:
    """Return the records of the ranks of this host that answer.

    Args:
        boards: path of each rank's board, by global rank.
    """
    answers = {rank: board.with_suffix(FLIGHT) for rank, board in boards.items()}
    asked = set()
    for rank, board in boards.items():
        answers[rank].unlink(missing_ok=True)
        with suppress(OSError):  # no pipe, or nobody reads it
            descriptor = os.open(board.with_suffix(ASK), os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"flight\n")
            os.close(descriptor)
            asked.add(rank)
    deadline = time.monotonic() + ANSWER_S
    while asked and time.monotonic() < deadline:
        if all(answers[rank].exists() for rank in asked):
            break
        time.sleep(LOOK_S)
    found = {}
    for rank in sorted(asked):
        with suppress(OSError, ValueError):
            found[rank] = read_flight(answers[rank].read_bytes())
    return found


def answer(board: Path, record: Any) -> None:
    """Write the record into a file each time a launcher asks; does not return.

    Args:
        board: path of this rank's board.
        record: returns the recorder's JSON, b"" where there is none.
    """
    pipe = board.with_suffix(ASK)
    os.mkfifo(pipe, 0o600)
    while True:
        with pipe.open("rb") as questions:
            questions.readline()
        text = record()
        if text:
            draft = board.with_suffix(f"{FLIGHT}.draft")
            draft.write_bytes(text)
            draft.replace(board.with_suffix(FLIGHT))
