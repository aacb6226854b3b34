"""The page ``docs/loops.md``: how each way of a loop ends under each strategy."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from cells import Line, Place, cell_on_page, cells_of_page, refusals_on_page, sums_on_page
from loops_table import RANKS, STRATEGIES, all_ways, topics, ways_of

INTRODUCTION = """# Loops

This page is written by the command below. It takes {ways} ways in which scripts touch gradients,
optimizer state, weights and loaders, under every strategy on two ranks, and compares the numbers
with plain torch in one process: what the way reads, and the weights at its end, in fp64.

```sh
python tests/loops/run.py
```

A cell says `=` where all numbers are equal. A number in brackets is a refusal: the same error on
every rank, before a wrong number; the [list](#refusals) has its text.
"""


def write(results: Mapping[Place, Line], path: Path) -> None:
    """Write the page.

    Args:
        results: the line of each cell that has run, by way and strategy.
        path: of the page.
    """
    path.write_text("\n".join(_page(results)) + "\n", encoding="utf-8")


def _page(results: Mapping[Place, Line]) -> Iterator[str]:
    yield INTRODUCTION.format(ways=len(all_ways()))
    reasons: dict[str, int] = {}
    yield from sums_on_page(results, list(all_ways()), dict.fromkeys(STRATEGIES, RANKS))
    for topic in topics().values():
        yield f"\n## {(topic.__doc__ or '').partition(':')[0].strip()}\n"
        yield f"| way | {' | '.join(STRATEGIES)} |"
        yield f"|---|{'---|' * len(STRATEGIES)}"
        for name in ways_of(topic):
            found = (cell_on_page(results.get((name, s)), reasons) for s in STRATEGIES)
            yield f"| {name} | {' | '.join(found)} |"
    yield from refusals_on_page(reasons)


def read(path: Path) -> dict[tuple[str, str], str]:
    """Return the text of every cell of a page, by way and strategy."""
    return cells_of_page(path, list(all_ways()), list(STRATEGIES))
