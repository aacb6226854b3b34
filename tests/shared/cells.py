"""Tables of cells, each trained on ranks in forked processes: the zoo of models, and the loops.

A cell has a row (a family, a way of a loop) and a column (a strategy). Its processes are forked
from one that has imported everything. The results file gets a line per cell; a run that was
interrupted goes on where it ended.
"""

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock
from typing import Any

TIME_LIMIT_S, GRACE_S = 120.0, 5.0
FORK = multiprocessing.get_context("fork")
FORKING = Lock()
"""Held while a process is forked: libraries refuse a fork during another thread's fork."""

EQUAL, REFUSED, DIFFERENT, CRASHED, HUNG = "equal", "refused", "different", "crashed", "hung"

Place = tuple[str, str]
Line = Mapping[str, Any]
Job = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Outcome:
    """How a cell ended.

    Attributes:
        kind: equal; refused, with an error that says why; or one of three failures.
        text: the reason, the first difference, or the end of the traceback.
        divided: the share of the parameters' bytes that no rank holds whole.
    """

    kind: str
    text: str = ""
    divided: float = 0.0


def joined(outcomes: Sequence[Outcome | None]) -> Outcome:
    """Return the outcome of a cell from those of its ranks; None is a rank without an answer."""
    kinds = {outcome.kind if outcome else HUNG for outcome in outcomes}
    known = [outcome for outcome in outcomes if outcome]
    if len(kinds) == 1 and known:
        return known[0]
    for kind in (CRASHED, DIFFERENT, REFUSED):
        for rank, outcome in enumerate(outcomes):
            if outcome and outcome.kind == kind:
                found = CRASHED if kind == REFUSED else kind
                return Outcome(found, f"on rank {rank} of {len(outcomes)} {kind}: {outcome.text}")
    return Outcome(HUNG, "no answer within the time limit")


def parser_of(about: str | None, rows: str, results: Path) -> argparse.ArgumentParser:
    """Return the parser of a program that runs a table.

    Args:
        about: what the program says of itself.
        rows: what rows are called, in the plural.
        results: the file of results, unless the command line names another.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"{rows}, with commas between; all")
    parser.add_argument("--strategy", default="", help="strategies of the table; all")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time; 1")
    parser.add_argument("--again", action="store_true", help="also cells with a result")
    parser.add_argument("--no-table", action="store_true", help="leave the page alone")
    parser.add_argument("--results", type=Path, default=results)
    return parser


def chosen(names: str, known: Sequence[str]) -> Sequence[str]:
    """Return the names between commas; all that are known if there are none."""
    wanted = [name for name in names.split(",") if name]
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"unknown: {sorted(unknown)}; there are {', '.join(known)}")
    return wanted or known


def import_everything(*modules: str) -> None:
    """Import in this process what the forked ones would import each for itself."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    import torch

    torch.set_num_threads(1)
    for name in (*modules, "drivetrain.checkpoint.export", "torch.distributed"):
        importlib.import_module(name)
    from drivetrain.registry import strategies

    for name in strategies().names:
        strategies().load(name)


def run_table(
    arguments: argparse.Namespace,
    places: Sequence[Place],
    run: Callable[[Path, Place], Outcome],
) -> dict[Place, Line]:
    """Run the cells whose results are not known, and return the results of all.

    Args:
        arguments: of the command line.
        places: row and column of each cell.
        run: runs a cell; is given a folder that all cells share.
    """
    path: Path = arguments.results
    known = {} if arguments.again else read(path)
    todo = [place for place in places if place not in known]
    print(f"{len(todo)} cells to run, {len(known)} known in {path}", flush=True)
    path.parent.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(arguments.jobs) as pool,
        path.open("a") as results,
    ):

        def line_of(place: Place) -> Line:
            start = time.monotonic()
            outcome = run(Path(folder), place)
            seconds = round(time.monotonic() - start, 1)
            row, strategy = place
            return {"family": row, "strategy": strategy, **asdict(outcome), "seconds": seconds}

        for number, line in enumerate(pool.map(line_of, todo), 1):
            results.write(json.dumps(line) + "\n")
            results.flush()
            print(f"{number}/{len(todo)}", _shown(line), flush=True)
    return read(path)


def failures(known: Mapping[Place, Line]) -> list[Line]:
    """Return the lines of cells that are neither equal to one process nor refused."""
    return [line for line in known.values() if line["kind"] not in (EQUAL, REFUSED)]


def read(path: Path) -> dict[Place, Line]:
    """Return the last line of every cell in a results file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(line["family"], line["strategy"]): line for line in map(json.loads, lines)}


def _shown(line: Line) -> str:
    text = f"{line['family']:24} {line['strategy']:8} {line['kind']:9} {line['seconds']:5.1f} s"
    return f"{text} {line['text'][:300]}".rstrip()


# --- pages ---

RESULTS = "\n## Results\n"
"""The heading of a page's part that is written here; what is above it is written by hand."""


def write_results(
    path: Path,
    results: Mapping[Place, Line],
    topics: Mapping[str, Sequence[str]],
    columns: Mapping[str, int],
    shown: Callable[[str], str] = str,
) -> None:
    """Write the results on a page: how many ended how, equal rows, and the others by strategies.

    Args:
        path: of the page.
        results: the line of each cell that has run.
        topics: rows by topic.
        columns: strategies, and on how many ranks each runs.
        shown: returns the text of a row.
    """
    lines = _results(results, topics, columns, shown)
    above = path.read_text(encoding="utf-8").partition(RESULTS)[0]
    path.write_text(f"{above}{RESULTS}\n" + "\n".join(lines) + "\n", encoding="utf-8")


def _results(
    results: Mapping[Place, Line],
    topics: Mapping[str, Sequence[str]],
    columns: Mapping[str, int],
    shown: Callable[[str], str],
) -> Iterator[str]:
    yield "| strategy | ranks | equal | refused | wrong, crashed or hung |"
    yield "|---|---|---|---|---|"
    kinds: dict[str, dict[str, str]] = {}
    for (row, column), line in results.items():
        kinds.setdefault(row, {})[column] = line["kind"]
    for column, ranks in columns.items():
        found = [of_row[column] for of_row in kinds.values() if column in of_row]
        equal, refused = found.count(EQUAL), found.count(REFUSED)
        yield f"| `{column}` | {ranks} | {equal} | {refused} | {len(found) - equal - refused} |"
    yield "\nEqual under every strategy:\n"
    others: dict[str, list[str]] = {}
    for topic, rows in topics.items():
        equal_rows = []
        for row in (row for row in rows if row in kinds):
            found = [(c, kinds[row][c]) for c in columns if kinds[row].get(c, EQUAL) != EQUAL]
            marks = (f"`{c}`" if kind == REFUSED else f"`{c}` **{kind}**" for c, kind in found)
            (others.setdefault(", ".join(marks), []) if found else equal_rows).append(shown(row))
        if equal_rows:
            yield f"- **{topic}**: {'; '.join(equal_rows)}."
    yield "\n| refused under | |\n|---|---|"
    for marks, rows in others.items():
        yield f"| {marks} | {'; '.join(rows)} |"


def read_results(path: Path, columns: Iterable[str]) -> dict[Place, str]:
    """Return how every cell of a page ended, by row and column."""
    text = path.read_text(encoding="utf-8").partition(RESULTS)[2]
    equal, _, others = text.partition("| refused under |")
    parts = [("", rows) for rows in re.findall(r"^- \*\*.*?\*\*: (.*)\.$", equal, re.MULTILINE)]
    parts += re.findall(r"^\| (`.*) \| (.*) \|$", others, re.MULTILINE)
    found: dict[Place, str] = {}
    for marks, rows in parts:
        kinds = dict(re.findall(r"`(\S+)`(?: \*\*(\w+)\*\*)?", marks))
        for row in rows.split("; "):
            name = re.sub(r" \d+%$", "", row)
            found |= {(name, column): kinds.get(column, EQUAL) or REFUSED for column in columns}
    return found


# --- processes ---


def run_ranks(
    ranks: int, folder: Path, function: Callable[..., Outcome], *arguments: Any
) -> Outcome:
    """Run a function on ranks that have a group, each in a process of its own.

    Args:
        ranks: how many.
        folder: of this cell alone; removed at the end.
        function: is given the arguments.
        arguments: of the function.
    """
    folder.mkdir()
    jobs = [(_rank, (rank, ranks, folder, function, arguments)) for rank in range(ranks)]
    outcome = joined(answers(jobs, folder))
    shutil.rmtree(folder)
    return outcome


def answers(jobs: Sequence[Job], folder: Path) -> list[Any]:
    """Return what each process answers, None for those that do not in time.

    Args:
        jobs: a function and its arguments for each process.
        folder: for what they print.
    """
    processes, pipes = [], []
    for job in jobs:
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_work, args=(theirs, folder, *job))
        with FORKING:
            process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    found: list[Any] = [None] * len(jobs)
    for index, answer in _received(pipes):
        found[index] = answer
    for process in processes:
        process.kill()
        process.join()
    return found


def _received(pipes: Sequence[Connection]) -> Iterator[tuple[int, Any]]:
    """Yield (index, answer) as they come; after a failure the others have only a moment."""
    deadline, waiting = time.monotonic() + TIME_LIMIT_S, dict(zip(pipes, itertools.count()))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            index = waiting.pop(pipe)
            try:
                answer = pipe.recv()
            except EOFError:  # the process has died
                answer = None
            if answer is None or answer.kind != EQUAL:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            yield index, answer


def _work(pipe: Connection, folder: Path, function: Any, arguments: tuple[Any, ...]) -> None:
    """Run in a process of its own: call the function, send its result, wait for the end."""
    output = os.open(folder / f"output-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    pipe.send(function(*arguments))
    time.sleep(TIME_LIMIT_S)  # others may still read from this rank; the parent ends them all


def _rank(
    rank: int, ranks: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIME_LIMIT_S),
    )
    return function(*arguments)
