"""The divisions of a model over cells that a search tries."""

from collections.abc import Iterator, Mapping
from typing import Any

LAYOUT_KEYS: Mapping[str, str] = {
    key: key for key in ("tp", "pp", "schedule", "chunks", "sequence_parallel")
}
CHUNKS = (2, 4, 8)
"""Stages per rank of the interleaved schedules that are tried."""


def cell_layouts(blocks: int, heads: int, ranks: int, per_host: int) -> Iterator[Mapping[str, Any]]:
    """Yield every division: ``tp`` inside of a host, ``pp`` that divides the blocks.

    Tensor parallelism over a network loses by an order of magnitude (Narayanan et al. 2021,
    arXiv 2104.04473, section 5.4.1), so it is not tried there.

    Args:
        blocks: repeated blocks of the model.
        heads: heads of attention.
        ranks: of all hosts.
        per_host: ranks of a host.
    """
    for tp in divisors(ranks):
        if tp > per_host or heads % tp:
            continue
        for pp in divisors(ranks // tp):
            if pp > blocks or blocks % pp or tp * pp == 1:
                continue
            for sequence in (False, True) if tp > 1 else (False,):
                common = {"tp": tp, "pp": pp, "sequence_parallel": sequence}
                yield {**common, "schedule": "1f1b", "chunks": 1}
                for chunks in CHUNKS if pp > 1 else ():
                    if blocks % (pp * chunks) == 0:
                        yield {**common, "schedule": "interleaved", "chunks": chunks}


def divisors(count: int) -> list[int]:
    """Return the numbers that divide a count, ascending."""
    return [each for each in range(1, count + 1) if count % each == 0]
