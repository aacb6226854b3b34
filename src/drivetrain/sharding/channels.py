"""The channels of one unit's gradients: within the ranks that share the unit, and over replicas."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.collectives.communicator import ReduceChannel, SumChannel
from drivetrain.collectives.stretch import Stretch, StretchParts
from drivetrain.errors import UsageError
from drivetrain.links.one_bit_adam import FrozenAdam
from drivetrain.sharding.layout import FlatLayout, stretches_of


class GradientKind(NamedTuple):
    """The gradients of one flat tensor, as they cross ranks.

    Attributes:
        layout: of the flat tensor.
        wire: their dtype.
    """

    layout: FlatLayout
    wire: torch.dtype


class GradientChannels:
    """Makes the channels of a unit when they are needed, and again when other gradients are sent.

    Args:
        reducing: the ranks that share the unit.
        replicas: the ranks that own the same parts of it; None: no others do.
        label: names the unit in errors.
        adam: turns gradients for replicas into momenta; None: gradients cross.
    """

    def __init__(
        self,
        reducing: Communicator,
        replicas: Communicator | None,
        label: str,
        adam: FrozenAdam | None,
    ) -> None:
        self._reducing = reducing
        self._replicas = replicas
        self._label = label
        self._adam = adam
        self._reduced: list[GradientKind] = []
        self._reduce: ReduceChannel | None = None
        self._under_way: list[Callable[[], None]] = []
        self._crossings: dict[int, SumChannel] = {}  # by identity: a layout is slow to compare

    def reduce(self, kinds: Sequence[GradientKind]) -> ReduceChannel:
        """Return the channel that sums gradients over the ranks that share the unit."""
        chosen = list(kinds)
        if self._reduce is None or not self._same(chosen):

            def describe() -> StretchParts:
                return stretches_of([kind.layout for kind in chosen], [k.wire for k in chosen])

            self._reduced = chosen
            self._reduce = self._reducing.gradients_scattered(
                describe, f"gradients of {self._label}", replaces=self._reduce
            )
        return self._reduce

    def open(self, kinds: Sequence[GradientKind]) -> None:
        """Make all channels now, before the first round: a checkpoint is about to be loaded."""
        if kinds:
            self.reduce(kinds)
        for kind in kinds:
            if self._replicas is not None:
                self._crossing(kind, self._replicas)

    def cross(
        self,
        kind: GradientKind,
        total: Tensor,
        pieces: Mapping[nn.Parameter, Tensor],
        *,
        then: Callable[[Tensor], None],
    ) -> None:
        """Start to sum this rank's pieces of a flat tensor over the replicas, in place.

        Args:
            kind: of the flat tensor.
            total: 1-D, all pieces.
            pieces: their places in it, by fragment.
            then: takes the sum, in ``finish_crossing``.

        Raises:
            UsageError: there are no replicas.
        """
        if self._replicas is None:
            raise UsageError("expected replicas to add gradients up with, found none")
        turn_back = None if self._adam is None else self._adam.exchange(pieces, self._replicas.size)
        handle = self._crossing(kind, self._replicas)(total)

        def finish() -> None:
            handle.wait()
            if turn_back is not None:
                turn_back()
            then(total)

        self._under_way.append(finish)

    def finish_crossing(self) -> None:
        """Wait for the replicas, and hand their sums out in the order of ``cross``."""
        under_way, self._under_way = self._under_way, []
        for finish in under_way:
            finish()

    def _crossing(self, kind: GradientKind, replicas: Communicator) -> SumChannel:
        if id(kind) not in self._crossings:
            pieces = kind.layout.stretches(kind.wire)[self._reducing.rank]
            stretch = Stretch.joined(pieces, kind.wire)
            self._crossings[id(kind)] = replicas.gradients_summed(
                stretch, f"gradients of replicas of {self._label}"
            )
        return self._crossings[id(kind)]

    def _same(self, kinds: Sequence[GradientKind]) -> bool:
        """Return whether the channel is about these flat tensors."""
        pairs = zip(kinds, self._reduced, strict=False)
        return len(kinds) == len(self._reduced) and all(a is b for a, b in pairs)
