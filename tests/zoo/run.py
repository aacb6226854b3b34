"""Runs the zoo, family by strategy, and writes the results on ``docs/inside/models.md``.

::

    python tests/zoo/run.py                            # all cells that the results lack, the table
    python tests/zoo/run.py --only llama,t5 --strategy tp2,pp2 --again
    python tests/zoo/run.py --jobs 4 --no-table

Every cell has processes of its own, forked from one that has imported everything. The results file
gets a line per cell; a run that was interrupted goes on where it ended. The exit code is 1 when a
cell is neither equal to one process nor refused with a reason.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "shared")]

import cells  # noqa: E402


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    results = ROOT / "build" / "zoo.jsonl"
    arguments = cells.parser_of(__doc__, "families", results).parse_args(words)
    cells.import_everything("peft", "transformers")

    from zoo_cell import FAMILIES, STRATEGIES, is_run, kinds, ranks_of

    families = cells.chosen(arguments.only, list(FAMILIES))
    strategies = cells.chosen(arguments.strategy, list(STRATEGIES))
    places = [(f, s) for f in families for s in strategies if is_run(f, s)]
    known = cells.run_table(arguments, places, Zoo().run)
    if not arguments.no_table:
        page, ranks = ROOT / "docs/inside/models.md", {name: ranks_of(name) for name in STRATEGIES}

        def shown(family: str) -> str:
            line = known.get((family, "tp2"), {"kind": ""})
            return f"{family} {line['divided']:.0%}" if line["kind"] == cells.EQUAL else family

        cells.write_results(page, known, kinds(), ranks, shown)
    return 1 if cells.failures(known) else 0


class Zoo:
    """Runs cells; those of one family share the numbers of one process."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._references: dict[Path, Lock] = {}

    def run(self, folder: Path, place: cells.Place) -> cells.Outcome:
        """Return the outcome of one cell."""
        from zoo_cell import parts_of, ranks_of

        family, strategy = place
        expected = folder / f"{family}-{parts_of(strategy)}.pt"
        with self._references.setdefault(expected, Lock()):  # other strategies may need it, too
            if not expected.exists():
                outcome = cells.joined(
                    cells.answers([(_reference, (family, parts_of(strategy), expected))], folder)
                )
                if outcome.kind != cells.EQUAL:
                    return outcome
        own = folder / f"cell-{next(self._count)}"
        return cells.run_ranks(ranks_of(strategy), own, _on_rank, place, expected)


def _reference(family: str, parts: int, path: Path) -> cells.Outcome:
    import torch

    from zoo_cell import FAMILIES
    from zoo_training import in_one_process

    try:
        record = in_one_process(FAMILIES[family], parts)
    except Exception as error:
        text = f"in one process: {type(error).__name__}: {error}"
        return cells.Outcome(cells.CRASHED, text)
    torch.save(record, path)
    return cells.Outcome(cells.EQUAL)


def _on_rank(place: cells.Place, expected: Path) -> Any:
    import torch

    from zoo_cell import run_on_rank

    return run_on_rank(*place, torch.load(expected, weights_only=False))


if __name__ == "__main__":
    raise SystemExit(main())
