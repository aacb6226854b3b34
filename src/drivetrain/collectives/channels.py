"""Channels: sums and gathers of the same tensors time and again, which a slow link may approximate.

Here all of them are exact; ``drivetrain.links.linked`` has those that are not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor

from drivetrain.collectives.handles import Handle
from drivetrain.collectives.stretch import Stretch, StretchParts
from drivetrain.collectives.volume import Parts
from drivetrain.shards import Reader, Shard

SumChannel: TypeAlias = Callable[[Tensor], Handle]
"""Sums the same flat tensor over ranks, time and again, on every rank."""

ReduceChannel: TypeAlias = Callable[[Parts], Handle]
"""Sums the same parts over ranks, time and again, each on the rank that keeps it."""

GatherChannel: TypeAlias = Callable[[Parts, Callable[[], None] | None], Handle]
"""Gathers the same parts, time and again; the second argument is ``first`` of ``gather_parts``."""


class Channels(ABC):
    """The channels of a communicator."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, *, label: str = "") -> Handle:
        """Replace a tensor by its sum over ranks."""

    @abstractmethod
    def gather_parts(
        self, parts: Parts, *, label: str = "", first: Callable[[], None] | None = None
    ) -> Handle:
        """Fill the tensors of the other ranks with the values of these ranks."""

    @abstractmethod
    def reduce_parts(self, parts: Parts, *, label: str = "") -> Handle:
        """Put the sums over ranks into this rank's tensors."""

    def gradients_summed(
        self, stretch: Stretch, label: str, replaces: SumChannel | None = None
    ) -> SumChannel:
        """Return a channel that replaces gradients by their sums over ranks.

        Args:
            stretch: describes the flat tensor of the gradients.
            label: names the operations in errors.
            replaces: a channel that is given up for this one, and under way no more. The state
                that an approximation has kept for the elements of this rank goes on.
        """

        def start(tensor: Tensor) -> Handle:
            return self.all_reduce(tensor, label=label)

        return start

    def renew_channels(self) -> None:
        """Give up the channels of gradients: others are about to take their places.

        Collective over the ranks of a host. What an approximation has kept back goes on to the
        channels that come, by the names of parameters; without one there is nothing to do.
        """
        return

    def gradients_scattered(
        self,
        describe: Callable[[], StretchParts],
        label: str,
        replaces: ReduceChannel | None = None,
    ) -> ReduceChannel:
        """Return a channel that puts the sums of gradients over ranks into this rank's tensors.

        Args:
            describe: describes the tensors of each rank; only asked where that is needed.
            label: names the operations in errors.
            replaces: a channel of this communicator that is given up, of some of the same tensors;
                the new one goes on with what that has kept back.
        """

        def start(parts: Parts) -> Handle:
            return self.reduce_parts(parts, label=label)

        return start

    def parameters_gathered(
        self, describe: Callable[[], StretchParts], label: str
    ) -> GatherChannel:
        """Return a channel that fills the tensors of all ranks with parameters.

        Args:
            describe: describes the tensors of each rank; only asked where that is needed.
            label: names the operations in errors.
        """

        def start(parts: Parts, first: Callable[[], None] | None) -> Handle:
            return self.gather_parts(parts, label=label, first=first)

        return start

    def parameters_updated(self, describe: Callable[[], StretchParts], label: str) -> GatherChannel:
        """Return a channel that brings updates of parameters to all ranks.

        Between two gathers the tensors stay as they are, and alike on all ranks; ``first`` writes
        the new values of this rank's tensors, and an approximation sends the difference.

        Args:
            describe: describes the tensors of each rank; only asked where that is needed.
            label: names the operations in errors.
        """
        return self.parameters_gathered(describe, label)

    def step_decided(self, *, taken: bool) -> None:
        """Note whether optimizers step with the sums since the last step, or the step is skipped.

        An approximation then goes on with what it had kept back before these sums.
        """
        return

    def kept(self) -> Iterator[Shard]:
        """Yield the state of channels of gradients, such as errors, for a checkpoint."""
        return iter(())

    def take_kept(self, reader: Reader) -> bool:
        """Let the channels so far go on with the state in a checkpoint.

        Returns:
            Whether channels keep anything.
        """
        return False

    def take_links(self, links: Any) -> None:
        """Let channels go on with methods for slow links that were chosen between two steps.

        Args:
            links: ``drivetrain.links.chosen.LinkMethods``; channels that stay exact ask for none.
        """
        return

    @property
    def approximates_parameters(self) -> bool:
        """Whether gathered values of parameters may differ from the values of their owners."""
        return False

    @property
    def owns_apart(self) -> bool:
        """Whether owners keep values apart from gathered ones, which are approximate or may be."""
        return False
