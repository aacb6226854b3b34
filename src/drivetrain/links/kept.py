"""Checkpoints of the state of approximate sums: errors, factors, counts of sums.

Each host has errors of its own, and all of them together are what earlier sums have left out. So a
checkpoint has errors for each host, as ranges of a parameter's elements in the order of memory::

    links.error.METHOD.HOST.FIRST     fp32, 1-D: the errors of elements from FIRST on
    links.factor.FIRST                what a method starts the next sum with, equal on all hosts
    links.sums.FIRST                  how many sums there were, for the warm-up

Whoever loads it gives the errors of each saved host to one host, which adds them up: with as many
hosts, to the same one; with fewer, some get the errors of several. So nothing is lost with another
number of ranks, or under another method.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.collectives.stretch import ParameterSpan
from drivetrain.links.compressor import FarReduction, Kept
from drivetrain.log import get_logger
from drivetrain.parts.saved_state import LINKS, OWN_MARK
from drivetrain.shards import Part, Reader, Shard

logger = get_logger(__name__)

_ERROR, _FACTOR, _SUMS = f"{LINKS}error.", f"{LINKS}factor.", f"{LINKS}sums."


class SavedErrors(NamedTuple):
    """The errors of some of a parameter's elements on one host of the run that saved them.

    Attributes:
        state: the key.
        method: that kept them.
        host: the number of the host.
        first: the first of the elements, in the order of memory.
        numel: how many elements.
    """

    state: str
    method: str
    host: int
    first: int
    numel: int


def save_state(reduction: FarReduction, method: str, host: int) -> Iterator[Shard]:
    """Yield the errors of one sum on this rank, and from host 0 its factors.

    Args:
        reduction: the sum.
        method: its method.
        host: the number of this rank's host.
    """
    for span, errors, _ in reduction.feedback():
        yield save_errors(span.name, span.first, errors, method, host)
    for span, factor in reduction.factors() if host == 0 else ():
        yield _shard(span.name, f"{_FACTOR}{span.first}", factor)


def save_errors(name: str, first: int, errors: Tensor, method: str, host: int) -> Shard:
    """Return the errors of a parameter's elements from ``first`` on, on this rank's host."""
    return _shard(name, f"{_ERROR}{method}.{host}.{first}", errors)


def save_count(span: ParameterSpan, sums: int) -> Shard:
    """Return how often a channel that is about this range of a parameter has summed."""
    return _shard(span.name, f"{_SUMS}{span.first}", torch.tensor(sums))


class SavedLinks:
    """The state of the sums of a saved run, from its checkpoint.

    Args:
        reader: the checkpoint.

    Attributes:
        methods: those that kept errors.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._errors: dict[str, list[SavedErrors]] = {}
        self._others: dict[str, list[str]] = {}
        for name, state in sorted(reader.keys()):
            if OWN_MARK in state:  # of a part of the parameter, which is not this rank's
                continue
            if state.startswith(_ERROR):
                method, host, first = state.removeprefix(_ERROR).split(".")
                (numel,) = reader.shape(name, state)
                saved = SavedErrors(state, method, int(host), int(first), numel)
                self._errors.setdefault(name, []).append(saved)
            elif state.startswith(LINKS):
                self._others.setdefault(name, []).append(state)
        self.methods = sorted({one.method for each in self._errors.values() for one in each})

    def sums(self, names: Sequence[str]) -> int:
        """Return how often gradients of these parameters were summed."""
        counts = [
            int(self._reader.read(name, state))
            for name in names
            for state in self._others.get(name, ())
            if state.startswith(_SUMS)
        ]
        return max(counts, default=0)

    def give(self, reduction: FarReduction, host: int, hosts: int) -> None:
        """Let a sum go on with this host's part of the saved errors, and with factors of its shape.

        Args:
            reduction: the sum.
            host: the number of this rank's host.
            hosts: how many there are now.
        """
        for kept in reduction.feedback():
            kept.errors.zero_()
            for saved in self._errors.get(kept.span.name, ()):
                if _taker(saved.host, kept, hosts) == host:
                    self._add(saved, kept)
        for span, factor in reduction.factors():
            self._restore(span, factor)

    def _add(self, saved: SavedErrors, kept: Kept) -> None:
        begin = kept.span.first
        low = max(saved.first, begin)
        high = min(saved.first + saved.numel, begin + kept.errors.numel())
        if low < high:
            part = Part.range_of((saved.numel,), low - saved.first, high - saved.first)
            values = self._reader.read(kept.span.name, saved.state, part)
            kept.errors[low - begin : high - begin].add_(values.to(kept.errors.device))

    def _restore(self, span: ParameterSpan, factor: Tensor) -> None:
        exact = f"{_FACTOR}{span.first}"
        states = [s for s in self._others.get(span.name, ()) if s.startswith(_FACTOR)]
        for state in sorted(states, key=lambda state: state != exact):
            # Rows of another range have the same columns: their factor is a better start than none.
            if self._reader.shape(span.name, state) == tuple(factor.shape):
                factor.copy_(self._reader.read(span.name, state))
                return


def kept_by(communicators: Iterable[Communicator]) -> Iterator[Shard]:
    """Yield the state of the channels of some communicators, for a checkpoint."""
    for communicator in communicators:
        yield from communicator.kept()


def take_kept(communicators: Iterable[Communicator], reader: Reader, method: str) -> None:
    """Let channels go on with a checkpoint, and say once if it was taken under another method.

    Args:
        communicators: their channels were made.
        reader: the checkpoint.
        method: for gradients, in this run.
    """
    keeping = [communicator.take_kept(reader) for communicator in communicators]
    saved = SavedLinks(reader)
    if saved.methods and (saved.methods != [method] or not any(keeping)):
        before = ", ".join(saved.methods)
        fate = (
            "are added to its first sums"
            if any(keeping)
            else "are left out: no sum of it keeps any"
        )
        logger.announce(
            f"the checkpoint was taken under links.far.gradients: {before}; this run goes on under "
            f"{method}, and the errors that were kept {fate}"
        )


def _taker(saved: int, kept: Kept, hosts: int) -> int:
    """Return the host for the errors of a saved host: the same number, if possible."""
    takers = [host for host in range(hosts) if host != kept.without]
    return saved if saved in takers else takers[saved % len(takers)]


def _shard(name: str, state: str, values: Tensor) -> Shard:
    shape = tuple(values.shape)
    return Shard(name, state, values.detach(), shape, Part.whole(shape))
