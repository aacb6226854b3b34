"""Runs the table of loops, way by strategy, and writes their results into ``results.md``.

::

    python tests/loops/run.py                            # all cells that the results lack, the page
    python tests/loops/run.py --only "torch clips by norm" --strategy zero2,tp2 --again --no-table

Every cell has processes of its own. The exit code is 1 when a cell is neither equal to one process
nor refused with a reason.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "shared")]

import cells  # noqa: E402


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    arguments = cells.parser_of(__doc__, "ways", ROOT / "build" / "loops.jsonl").parse_args(words)
    cells.import_everything("transformers", "peft")

    from loops_table import RANKS, STRATEGIES, all_ways

    ways = cells.chosen(arguments.only, list(all_ways()))
    strategies = cells.chosen(arguments.strategy, list(STRATEGIES))
    count = itertools.count()

    def run(folder: Path, place: cells.Place) -> cells.Outcome:
        return cells.run_ranks(RANKS, folder / f"cell-{next(count)}", _on_rank, place)

    places = [(way, strategy) for way in ways for strategy in strategies]
    known = cells.run_table(arguments, places, run)
    if not arguments.no_table:
        from loops_table import titles

        page = HERE / "results.md"
        cells.write_results(page, known, titles(), dict.fromkeys(STRATEGIES, RANKS))
    return 1 if cells.failures(known) else 0


def _on_rank(place: cells.Place) -> cells.Outcome:
    from loops_table import STRATEGIES, all_ways
    from way_kit import run_on_rank

    return run_on_rank(all_ways()[place[0]], STRATEGIES[place[1]])


if __name__ == "__main__":
    raise SystemExit(main())
