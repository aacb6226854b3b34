"""The state of approximate sums that outlives a sum: in channels, between them, in checkpoints.

Errors, factors and counts of sums. Each host has errors of its own, and all of them together are
what earlier sums have left out. So a checkpoint has errors for each host, as ranges of a
parameter's elements in the order of memory::

    links.error.METHOD.HOST.FIRST     fp32, 1-D: the errors of elements from FIRST on
    links.factor.FIRST                what a method starts the next sum with, equal on all hosts
    links.sums.FIRST                  how many sums there were, for the warm-up

Whoever loads it gives the errors of each saved host to one host, which adds them up: with as many
hosts, to the same one; with fewer, some get the errors of several. So nothing is lost with another
number of ranks, or under another method.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.collectives import Communicator, Handle, Parts
from drivetrain.collectives.volume import ParameterSpan
from drivetrain.compression.compressor import FarReduction, Kept
from drivetrain.log import get_logger
from drivetrain.runtime.parts import Part
from drivetrain.saved_state import LINKS, OWN_MARK
from drivetrain.shards import Reader, Shard

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


# --- a channel that is exact at first, and that can take a step back ---


@dataclass(eq=False, slots=True)
class LinkChannel:
    """A channel of gradients that is exact until it has a method, and through the warm-up.

    Attributes:
        exact: starts a sum without a method.
        warmup: how many sums are exact.
        undoable: whether a step may be skipped: then errors and factors of before the step are
            kept, too.
        approximate: starts a sum by the method; None: there is none yet.
        reduction: its sum between hosts.
        spans: the ranges of parameters that it is about.
        sums: how many there were.
    """

    exact: Callable[..., Handle]
    warmup: int
    undoable: bool = False
    approximate: Callable[..., Handle] | None = None
    reduction: FarReduction = field(init=False)
    spans: Sequence[ParameterSpan] = ()
    sums: int = 0
    _sums_of_step: int = 0
    _copied: bool = False
    _before: list[Tensor] = field(default_factory=list)

    def take_method(
        self,
        reduction: FarReduction,
        spans: Sequence[ParameterSpan],
        approximate: Callable[..., Handle],
    ) -> None:
        """Sum by a method from now on."""
        self.reduction, self.spans, self.approximate = reduction, spans, approximate

    def __call__(self, tensors: Tensor | Parts) -> Handle:
        """Start the sum."""
        self.sums += 1
        self._sums_of_step += 1
        if self.approximate is None or self.sums <= self.warmup:
            return self.exact(tensors)
        if self.undoable:
            self.copy()
        return self.approximate(tensors)

    def give_back(self, names: Collection[str]) -> None:
        """Put the errors of some parameters back to before the first sum of this step."""
        if self._copied:
            for kept, before in zip(self.reduction.feedback(), self._before, strict=False):
                if kept.span.name in names:
                    kept.errors.copy_(before)

    def step_decided(self, *, taken: bool) -> None:
        """Go on after a step; if it was skipped, as if none of its sums had been.

        Args:
            taken: whether optimizers step.
        """
        if not taken:
            self.sums -= self._sums_of_step
            if self._copied:
                torch._foreach_copy_(self._state(), self._before)
        self._begin_step()

    def resume(self, sums: int) -> None:
        """Go on with the state of a checkpoint, which is in the errors and factors already.

        Args:
            sums: how many there were.
        """
        self.sums = sums
        self._begin_step()

    def _begin_step(self) -> None:
        self._sums_of_step, self._copied = 0, False
        if not self.undoable:
            self._before = []

    def copy(self) -> None:
        """Copy errors and factors, as they are before the first sum of a step."""
        if self.undoable and self._copied:  # a step may have several sums
            return
        state = self._state()
        if [each.device for each in self._before] != [each.device for each in state]:
            self._before = [torch.empty_like(each) for each in state]
        torch._foreach_copy_(self._before, state)
        self._copied = True

    def _state(self) -> list[Tensor]:
        errors = [kept.errors for kept in self.reduction.feedback()]
        return [*errors, *(factor for _, factor in self.reduction.factors())]


# --- the state of channels that were given up, until channels of the same parameters come ---

# A channel is given up when other gradients are sent: parameters were frozen, or other units of the
# model had gradients. Errors wait by the name of their parameter and the place of their elements,
# so that the sum of all errors stays the same whatever channels come::
#
#     given up     | weight, 0 to 900   | bias  |
#     comes        | weight, 0 to 500 |              900 - 500 errors of weight, and bias, wait on


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

    def shards(
        self, channels: Sequence[LinkChannel], method: str, host: int, *, counted: bool
    ) -> Iterator[Shard]:
        """Yield these errors and all state of channels, for a checkpoint.

        Args:
            channels: of this rank.
            method: of the channels.
            host: the number of this rank's host; factors and counts are those of host 0, since
                elsewhere a channel may be about any of its parameters alone.
            counted: whether there is a warm-up.
        """
        kept = [each for channel in channels for each in channel.reduction.feedback()]
        errors = [(span.name, ParkedErrors(span.first, values)) for span, values, _ in kept]
        errors += [(name, piece) for name, pieces in self._errors.items() for piece in pieces]
        for name, (first, values) in errors:
            yield Shard.whole(name, f"{_ERROR}{method}.{host}.{first}", values)
        for channel in channels if host == 0 else ():
            for span, factor in channel.reduction.factors():
                yield Shard.whole(span.name, f"{_FACTOR}{span.first}", factor)
            for span in channel.spans if counted else ():
                yield Shard.whole(span.name, f"{_SUMS}{span.first}", torch.tensor(channel.sums))

    def park(self, channel: LinkChannel) -> None:
        """Keep the state of a channel that is given up."""
        for span, errors, _ in channel.reduction.feedback():
            piece = ParkedErrors(span.first, errors.clone())
            self._errors.setdefault(span.name, []).append(piece)
        for span, factor in channel.reduction.factors():
            self._factors.setdefault(span.name, {})[span.first] = factor.clone()
        for span in channel.spans:
            self._sums[span.name] = max(channel.sums, self._sums.get(span.name, 0))

    def share(self, span: ParameterSpan, near: Communicator, device: torch.device) -> None:
        """Let each rank of a host have all errors of a parameter on this host. Collective."""
        errors = torch.zeros(span.numel, dtype=torch.float32, device=device)
        for first, values in self._errors.pop(span.name, ()):
            errors[first : first + values.numel()] = values
        near.all_reduce(errors, label="errors that are kept").wait()
        self._errors[span.name] = [ParkedErrors(0, errors)]

    def drop(self, name: str) -> None:
        """Forget the errors of a parameter: other ranks of this host go on with them."""
        self._errors.pop(name, None)

    def give(self, reduction: FarReduction) -> None:
        """Move errors and factors of the same elements to a new sum."""
        for span, errors, _ in reduction.feedback():
            self._errors[span.name] = [
                rest
                for piece in self._errors.get(span.name, ())
                for rest in _move(piece, ParkedErrors(span.first, errors))
            ]
        for span, factor in reduction.factors():
            found = self._factors.get(span.name, {}).pop(span.first, None)
            if found is not None and found.shape == factor.shape:
                factor.copy_(found)

    def sums(self, names: Sequence[str]) -> int:
        """Return how often gradients of these parameters were summed."""
        return max((self._sums.get(name, 0) for name in names), default=0)


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
