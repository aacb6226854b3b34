"""The state of channels that were given up, until channels of the same parameters come.

A channel is given up when other gradients are sent: parameters were frozen, or other units of the
model had gradients. Errors wait by the name of their parameter and the place of their elements,
so that the sum of all errors stays the same whatever channels come::

    given up     | weight, 0 to 900   | bias  |
    comes        | weight, 0 to 500 |              900 - 500 errors of weight, and bias, wait on
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from drivetrain.links.compressor import FarReduction
from drivetrain.links.warmed import Warmed


class ParkedErrors(NamedTuple):
    """Errors of a range of a parameter's elements.

    Attributes:
        first: the first of the elements, in the order of memory.
        errors: fp32, 1-D.
    """

    first: int
    errors: Tensor


class ParkedState:
    """Errors, factors and counts of channels that were given up, by the names of parameters."""

    def __init__(self) -> None:
        self._errors: dict[str, list[ParkedErrors]] = {}
        self._factors: dict[str, dict[int, Tensor]] = {}
        self._sums: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[str, ParkedErrors]]:
        """Yield all errors, with the names of their parameters."""
        for name, pieces in self._errors.items():
            for piece in pieces:
                yield name, piece

    def park(self, channel: Warmed) -> None:
        """Keep the state of a channel that is given up."""
        for span, errors, _ in channel.reduction.feedback():
            piece = ParkedErrors(span.first, errors.clone())
            self._errors.setdefault(span.name, []).append(piece)
        for span, factor in channel.reduction.factors():
            self._factors.setdefault(span.name, {})[span.first] = factor.clone()
        for span in channel.spans:
            self._sums[span.name] = max(channel.sums, self._sums.get(span.name, 0))

    def errors_of(self, name: str) -> list[ParkedErrors]:
        """Take away all errors of a parameter, and return them."""
        return self._errors.pop(name, [])

    def give(self, reduction: FarReduction) -> None:
        """Move errors and factors of the same elements to a new sum."""
        for span, errors, _ in reduction.feedback():
            left = [
                rest
                for piece in self._errors.pop(span.name, ())
                for rest in _move(piece, ParkedErrors(span.first, errors))
            ]
            if left:
                self._errors[span.name] = left
        for span, factor in reduction.factors():
            found = self._factors.get(span.name, {}).pop(span.first, None)
            if found is not None and found.shape == factor.shape:
                factor.copy_(found)

    def sums(self, names: Sequence[str]) -> int:
        """Return how often gradients of these parameters were summed."""
        return max((self._sums.get(name, 0) for name in names), default=0)

    def clear(self) -> None:
        """Forget everything: a checkpoint is loaded."""
        self._errors.clear()
        self._factors.clear()
        self._sums.clear()


def _move(piece: ParkedErrors, place: ParkedErrors) -> list[ParkedErrors]:
    """Add the errors of a piece to those of a place; return the rest of the piece."""
    first, errors = piece
    low = max(first, place.first)
    high = min(first + errors.numel(), place.first + place.errors.numel())
    if low >= high:
        return [piece]
    begin, end = low - first, high - first
    start = low - place.first
    place.errors[start : start + end - begin].add_(errors[begin:end].to(place.errors.device))
    rest = (ParkedErrors(first, errors[:begin]), ParkedErrors(high, errors[end:]))
    return [each for each in rest if each.errors.numel()]
