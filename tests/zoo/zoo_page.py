"""The page ``docs/models.md``: how each family fares under each strategy."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from cells import Line, Place, cell_on_page, cells_of_page, refusals_on_page, sums_on_page
from families import FAMILIES
from zoo_cell import STRATEGIES, ranks_of

INTRODUCTION = """# Models

This page is written by the command below. It trains tiny models of {families} families under every
strategy, and compares the numbers with the same training in one process: the losses, the gradient
norms, all weights, and an evaluation on every rank. Every training has two param groups,
accumulates two micro-batches, clips gradients, and computes in fp64.

```sh
python tests/zoo/run.py
```

A cell of the table says `=` where all numbers are equal. A number in brackets is a refusal: an
error on every rank before the first wrong number; the [list](#refusals) has its text. Under `tp2`
the table shows which share of the bytes of the model's blocks is divided over the two ranks. A
model without linear layers has nothing to divide.
"""


def write(results: Mapping[Place, Line], path: Path) -> None:
    """Write the page.

    Args:
        results: the line of each cell that has run, by family and strategy.
        path: of the page.
    """
    path.write_text("\n".join(page(results)) + "\n", encoding="utf-8")


def page(results: Mapping[Place, Line]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield INTRODUCTION.format(families=len(FAMILIES))
    reasons: dict[str, int] = {}
    ranks = {strategy: ranks_of(strategy) for strategy in STRATEGIES}
    yield from sums_on_page(results, list(FAMILIES), ranks)
    kinds = dict.fromkeys(family.kind for family in FAMILIES.values())
    for kind in kinds:
        yield f"\n## {kind[0].upper()}{kind[1:]}\n"
        yield f"| family | {' | '.join(STRATEGIES)} |"
        yield f"|---|{'---|' * len(STRATEGIES)}"
        for name, family in FAMILIES.items():
            if family.kind == kind:
                cells = (_cell(results.get((name, s)), reasons) for s in STRATEGIES)
                yield f"| {name} | {' | '.join(cells)} |"
    yield from refusals_on_page(reasons)


def _cell(line: Line | None, reasons: dict[str, int]) -> str:
    text = cell_on_page(line, reasons)
    if line is None or text != "=" or line["strategy"] != "tp2":
        return text
    return f"= {line['divided']:.0%}"


def read(path: Path) -> dict[tuple[str, str], str]:
    """Return the text of every cell of a page, by family and strategy."""
    return cells_of_page(path, list(FAMILIES), list(STRATEGIES))
