"""The page ``docs/models.md``: how each family fares under each strategy."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from families import FAMILIES
from zoo_cell import DIFFERENT, EQUAL, REFUSED, STRATEGIES, ranks_of

Line = Mapping[str, Any]
Results = Mapping[tuple[str, str], Line]

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

EMPTY = ""


def write(results: Results, path: Path) -> None:
    """Write the page.

    Args:
        results: the line of each cell that has run, by family and strategy.
        path: of the page.
    """
    path.write_text("\n".join(page(results)) + "\n", encoding="utf-8")


def page(results: Results) -> Iterator[str]:
    """Yield the lines of the page."""
    yield INTRODUCTION.format(families=len(FAMILIES))
    reasons: dict[str, int] = {}
    yield from _sums(results)
    kinds = dict.fromkeys(family.kind for family in FAMILIES.values())
    for kind in kinds:
        yield f"\n## {kind[0].upper()}{kind[1:]}\n"
        yield f"| family | {' | '.join(STRATEGIES)} |"
        yield f"|---|{'---|' * len(STRATEGIES)}"
        for name, family in FAMILIES.items():
            if family.kind == kind:
                cells = (_cell(results.get((name, s)), reasons) for s in STRATEGIES)
                yield f"| {name} | {' | '.join(cells)} |"
    yield "\n## Refusals\n"
    for reason, number in reasons.items():
        yield f"{number}. `{reason.replace('`', chr(39))}`"


def _sums(results: Results) -> Iterator[str]:
    yield "| strategy | ranks | equal | refused | wrong, crashed or hung |"
    yield "|---|---|---|---|---|"
    for strategy in STRATEGIES:
        lines = (results.get((family, strategy)) for family in FAMILIES)
        kinds = [line["kind"] for line in lines if line]
        equal, refused = kinds.count(EQUAL), kinds.count(REFUSED)
        failed = len(kinds) - equal - refused
        yield f"| `{strategy}` | {ranks_of(strategy)} | {equal} | {refused} | {failed} |"


def _cell(line: Line | None, reasons: dict[str, int]) -> str:
    if line is None:
        return EMPTY
    if line["kind"] == REFUSED:
        text = " ".join(line["text"].split())
        return f"[{reasons.setdefault(text, len(reasons) + 1)}]"
    if line["kind"] != EQUAL:
        return "**wrong**" if line["kind"] == DIFFERENT else f"**{line['kind']}**"
    return f"= {line['divided']:.0%}" if line["strategy"] == "tp2" else "="


def read(path: Path) -> dict[tuple[str, str], str]:
    """Return the text of every cell of a page, by family and strategy."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        family, *cells = [text.strip() for text in line.strip("|").split("|")]
        if line.startswith("|") and family in FAMILIES:
            found.update({(family, s): text for s, text in zip(STRATEGIES, cells, strict=True)})
    return found
