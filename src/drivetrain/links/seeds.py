"""The seeds of sums whose numbers are rounded by chance.

A seed is a function of the parameter, the rank and how many sums there were, so that no message
has the draws of another one. The counts are in checkpoints, and go back where a step is skipped: a
run that goes on draws what it would have drawn.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from drivetrain.collectives.stretch import ParameterSpan

_SEED_BYTES = 8


class SeedCounts:
    """How many sums there were, of each range of a parameter.

    Args:
        spans: the ranges.
    """

    def __init__(self, spans: Sequence[ParameterSpan]) -> None:
        self._spans = spans
        self._counts = torch.zeros(len(spans), dtype=torch.int64)

    @staticmethod
    def nbytes(spans: Sequence[ParameterSpan]) -> int:
        """Return the bytes of the counts of these ranges."""
        return torch.int64.itemsize * len(spans)

    def __iter__(self) -> Iterator[tuple[ParameterSpan, Tensor]]:
        """Yield the count of each range, 0-d and no copy."""
        return zip(self._spans, self._counts, strict=True)

    def advance(self) -> None:
        """Count one more sum of all ranges."""
        if self._spans:
            # Ranges that were in different sums before are in one now: no seed comes twice.
            self._counts.fill_(self._counts.max() + 1)

    def seed(self, spans: Sequence[ParameterSpan], rank: int) -> int:
        """Return the seed of a rank's message about some of the ranges in the next sum.

        Args:
            spans: the ranges in the message.
            rank: the sender, along the axis between hosts.
        """
        if not self._spans or not spans:
            return 0
        facts = f"{spans[0].name} {spans[0].first} {rank} {int(self._counts.max())}"
        return int.from_bytes(sha256(facts.encode()).digest()[:_SEED_BYTES], "little")
