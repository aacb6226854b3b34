"""Counts what a reader of the source meets, and what a step costs where the model costs nothing.

::

    python benchmarks/house.py                                # this checkout
    python benchmarks/house.py --root ../older --root .       # a column for each, timed in turn
    python benchmarks/house.py --only modules circles --json

A checkout is run by the interpreter of its ``.venv``, if it has one, else by this one. Two to four
processes on this machine, gloo, a thread each; ``source_tree.py`` and ``house_runs.py`` say how
everything is counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from source_tree import ROOTS, SourceTree

HERE = Path(__file__).resolve().parent
Rows = dict[str, float]
"""The figures of one checkout, by the name of their row."""


# --- read from the source ---


def count_modules(tree: SourceTree) -> Rows:
    return {"modules": len(tree.modules), "lines": tree.lines}


def count_names(tree: SourceTree) -> Rows:
    return {
        "class names in two or more files": len(tree.homonyms("class")),
        "function names in two or more files": len(tree.homonyms("function")),
    }


def count_circles(tree: SourceTree) -> Rows:
    files, folders = tree.file_circles(), tree.folder_circles()
    return {
        "circles among files": len(files),
        "files in them": sum(map(len, files)),
        "circles among folders": len(folders),
        "folders and files in them": sum(map(len, folders)),
    }


# --- run on ranks ---


def run(root: Path, ranks: int, *arguments: str) -> dict[str, dict[str, float]]:
    """Run ``house_runs.py`` on ranks of a checkout; return what its rank 0 printed.

    Raises:
        RuntimeError: it failed, or the checkout's interpreter runs another checkout's code.
    """
    own = root / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    sources = os.pathsep.join(str(root / part) for part in ROOTS)
    finished = subprocess.run(
        [python, "-W", "ignore", *launcher, str(HERE / "house_runs.py"), *arguments],
        env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{root}: {' '.join(arguments)} failed:\n{finished.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    if Path(result["root"]) != root:
        raise RuntimeError(
            f"expected the code of {root}, but its interpreter {python} runs that of "
            f"{result['root']}; install the checkout into {root}/.venv"
        )
    return result["rows"]  # type: ignore[no-any-return]


def count_trace(root: Path) -> Rows:
    return {
        f"step of {side}: {what}": count
        for side, counts in run(root, 2, "trace").items()
        for what, count in counts.items()
    }


def count_passes(root: Path) -> Rows:
    return {
        f"megatron prepare() of {model}, {layout}: {what}": count
        for layout, ranks in (("tp=2", 2), ("tp=2 pp=2", 4))
        for model, counts in run(root, ranks, "passes").items()
        for what, count in counts.items()
    }


def time_host(root: Path, steps: int) -> Rows:
    return {
        f"step of {side}, ms: {clock}": milliseconds
        for side, clocks in run(root, 2, "host", "--steps", str(steps)).items()
        for clock, milliseconds in clocks.items()
    }


# --- the command ---


def timed_in_turn(roots: Sequence[Path], options: argparse.Namespace) -> list[Rows]:
    """Return the median over rounds of each checkout's times, each first as often as the others."""
    series: list[dict[str, list[float]]] = [defaultdict(list) for _ in roots]
    for turn in range(options.rounds):
        for place in range(len(roots)):
            column = (turn + place) % len(roots)
            for name, value in time_host(roots[column], options.steps).items():
                series[column][name].append(value)
    return [{name: statistics.median(v) for name, v in rows.items()} for rows in series]


READ: Mapping[str, Callable[[SourceTree], Rows]] = {
    "modules": count_modules,
    "names": count_names,
    "circles": count_circles,
}
RUN: Mapping[str, Callable[[Path], Rows]] = {"trace": count_trace, "passes": count_passes}


def measure(options: argparse.Namespace) -> list[Rows]:
    """Return the figures of each root."""
    columns: list[Rows] = []
    for root in options.root:
        tree = SourceTree(root)
        rows: Rows = {}
        for name, count in READ.items():
            rows |= count(tree) if name in options.only else {}
        for name, count_run in RUN.items():
            rows |= count_run(root) if name in options.only else {}
        columns.append(rows)
    if "host" in options.only:
        times = timed_in_turn(options.root, options)
        columns = [{**rows, **more} for rows, more in zip(columns, times, strict=True)]
    return columns


def table(columns: Sequence[Rows], roots: Sequence[Path]) -> str:
    """Return a Markdown table: a row for each figure, a column for each checkout."""
    lines = [
        "| | " + " | ".join(root.name for root in roots) + " |",
        "|---" * (len(roots) + 1) + "|",
    ]
    for name in dict.fromkeys(name for rows in columns for name in rows):
        values = (rows.get(name) for rows in columns)
        cells = (
            "" if v is None else f"{v:,.2f}" if isinstance(v, float) else f"{v:,}" for v in values
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = (*READ, *RUN, "host")
    parser.add_argument("--root", type=Path, action="append", help="a checkout; default this one")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--rounds", type=int, default=5, help="of timing, each with new processes")
    parser.add_argument("--steps", type=int, default=60, help="of each strategy in a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.root = [root.resolve() for root in options.root or [HERE.parent]]
    columns = measure(options)
    if options.json:
        print(json.dumps({str(r): rows for r, rows in zip(options.root, columns, strict=True)}))
    else:
        print(table(columns, options.root))


if __name__ == "__main__":
    main()
