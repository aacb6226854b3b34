"""The channels of one unit's gradients: within the ranks that share the unit, and over replicas."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from drivetrain.collectives import Communicator
from drivetrain.collectives.channels import ReduceChannel, SumChannel
from drivetrain.collectives.stretch import Stretch, StretchParts
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
        label: names the unit in errors.
    """

    def __init__(self, reducing: Communicator, label: str) -> None:
        self._reducing = reducing
        self._label = label
        self._reduced: list[GradientKind] = []
        self._reduce: ReduceChannel | None = None
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

    def open(self, kinds: Sequence[GradientKind], replicas: Communicator | None) -> None:
        """Make all channels now, before the first round: a checkpoint is about to be loaded."""
        if kinds:
            self.reduce(kinds)
        for kind in kinds:
            if replicas is not None:
                self.cross(kind, replicas)

    def cross(self, kind: GradientKind, replicas: Communicator) -> SumChannel:
        """Return the channel that sums this rank's pieces of a flat tensor over replicas."""
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
