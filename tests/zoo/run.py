"""Runs the zoo, family by strategy, and writes the table of ``docs/models.md``.

::

    python tests/zoo/run.py                            # all cells that the results lack, the table
    python tests/zoo/run.py --only llama,t5 --strategy tp2,pp2 --again
    python tests/zoo/run.py --jobs 4 --no-table

Every cell has processes of its own, forked from one that has imported everything. The results file
gets a line per cell; a run that was interrupted goes on where it ended. The exit code is 1 when a
cell is neither equal to one process nor refused with a reason.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE)]
os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")

TIME_LIMIT_S, GRACE_S = 120.0, 5.0
FORK = multiprocessing.get_context("fork")
FORKING = Lock()
"""Held while a process is forked: libraries refuse a fork during another thread's fork."""


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    arguments = _parser().parse_args(words)
    import torch

    from zoo_cell import FAMILIES, STRATEGIES, is_run

    torch.set_num_threads(1)
    _import_everything()
    families = _chosen(arguments.only, list(FAMILIES))
    strategies = _chosen(arguments.strategy, list(STRATEGIES))
    path: Path = arguments.results
    known = {} if arguments.again else read(path)
    todo = [(f, s) for f in families for s in strategies if is_run(f, s) and (f, s) not in known]
    print(f"{len(todo)} cells to run, {len(known)} known in {path}", flush=True)
    path.parent.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(arguments.jobs) as pool,
        path.open("a") as results,
    ):
        for number, line in enumerate(pool.map(Cells(Path(folder)).run, todo), 1):
            results.write(json.dumps(line) + "\n")
            results.flush()
            print(f"{number}/{len(todo)}", _shown(line), flush=True)
    known = read(path)
    failures = [line for line in known.values() if line["kind"] not in ("equal", "refused")]
    if not arguments.no_table:
        from zoo_page import write

        write(known, ROOT / "docs" / "models.md")
    return 1 if failures else 0


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the last line of every cell in a results file."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = map(json.loads, lines)
    return {(line["family"], line["strategy"]): line for line in found}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="families, with commas between; all")
    parser.add_argument("--strategy", default="", help="strategies of the table; all")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time; 1")
    parser.add_argument("--again", action="store_true", help="also cells with a result")
    parser.add_argument("--no-table", action="store_true", help="leave docs/models.md alone")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "zoo.jsonl")
    return parser


def _chosen(names: str, known: list[str]) -> list[str]:
    wanted = [name for name in names.split(",") if name]
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"unknown: {sorted(unknown)}; there are {', '.join(known)}")
    return wanted or known


def _shown(line: dict[str, Any]) -> str:
    text = f"{line['family']:24} {line['strategy']:8} {line['kind']:9} {line['seconds']:5.1f} s"
    return f"{text} {line['text'][:300]}".rstrip()


def _import_everything() -> None:
    """Import in this process what the forked ones would import each for itself."""
    import importlib

    for name in ("peft", "transformers", "drivetrain.checkpoint", "torch.distributed"):
        importlib.import_module(name)
    from drivetrain.registry import strategies

    for name in strategies().names:
        strategies().load(name)


class Cells:
    """Runs cells, each in processes of its own.

    Args:
        folder: for the numbers of one process, for what cells print, and for their meetings.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = itertools.count()
        self._references: dict[Path, Lock] = {}

    def run(self, place: tuple[str, str]) -> dict[str, Any]:
        """Return the line of one cell of the results."""
        from zoo_cell import EQUAL, joined, parts_of, ranks_of

        family, strategy = place
        start, ranks = time.monotonic(), ranks_of(strategy)
        own = self.folder / f"cell-{next(self._count)}"
        own.mkdir()
        expected = self.folder / f"{family}-{parts_of(strategy)}.pt"
        outcome = None
        with self._references.setdefault(expected, Lock()):  # other strategies may need it, too
            if not expected.exists():
                jobs = [(_reference, (family, parts_of(strategy), expected))]
                outcome = joined(_answers(jobs, own))
        if outcome is None or outcome.kind == EQUAL:
            jobs = [(_rank, (rank, ranks, own, place, expected)) for rank in range(ranks)]
            outcome = joined(_answers(jobs, own))
        shutil.rmtree(own)
        seconds = round(time.monotonic() - start, 1)
        return {"family": family, "strategy": strategy, **asdict(outcome), "seconds": seconds}


def _answers(jobs: Sequence[tuple[Any, tuple[Any, ...]]], folder: Path) -> list[Any]:
    """Return what each process answers, None for those that do not in time."""
    processes, pipes = [], []
    for job in jobs:
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_work, args=(theirs, folder, *job))
        with FORKING:
            process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    answers: list[Any] = [None] * len(jobs)
    for index, answer in _received(pipes):
        answers[index] = answer
    for process in processes:
        process.kill()
        process.join()
    return answers


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
            if answer is None or answer.kind != "equal":
                deadline = min(deadline, time.monotonic() + GRACE_S)
            yield index, answer


def _work(pipe: Connection, folder: Path, function: Any, arguments: tuple[Any, ...]) -> None:
    """Run in a process of its own: call the function, send its result, wait for the end."""
    output = os.open(folder / f"output-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    pipe.send(function(*arguments))
    time.sleep(TIME_LIMIT_S)  # others may still read from this rank; the parent ends them all


def _reference(family: str, parts: int, path: Path) -> Any:
    import torch

    from zoo_cell import CRASHED, EQUAL, FAMILIES, Outcome
    from zoo_training import in_one_process

    try:
        record = in_one_process(FAMILIES[family], parts)
    except Exception as error:
        return Outcome(CRASHED, f"in one process: {type(error).__name__}: {error}")
    torch.save(record, path)
    return Outcome(EQUAL)


def _rank(rank: int, ranks: int, folder: Path, place: tuple[str, str], expected: Path) -> Any:
    import torch
    import torch.distributed as dist

    from zoo_cell import run_on_rank

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
    return run_on_rank(*place, torch.load(expected, weights_only=False))


if __name__ == "__main__":
    raise SystemExit(main())
