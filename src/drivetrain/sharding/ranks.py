"""The ranks that train one model together, and how they divide it."""

from dataclasses import dataclass

from drivetrain.collectives import Communicator


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who shares what.

    Attributes:
        everyone: all ranks that train the model on batches of their own.
        sharing: the ranks that each own a part of every unit.
        reducing: the same ranks, for gradients. Where units are gathered in backward, that is a
            communicator of its own: over gloo ranks may then finish gradients in different places
            of the order of gathers, as when a parameter has no gradient on one of them. Backends
            with one queue per group still want one order.
        replicas: the ranks that own the same parts as this one; None: no others do, and those who
            share are everyone.
    """

    everyone: Communicator
    sharing: Communicator
    reducing: Communicator
    replicas: Communicator | None = None

    @classmethod
    def all_sharing(cls, everyone: Communicator) -> "Ranks":
        """Return ranks of which each owns a part of its own."""
        return cls(everyone, everyone, everyone)

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks for all about what is whole everywhere."""
        return self.everyone.rank == 0

    @property
    def original(self) -> bool:
        """Whether this rank speaks for its replicas."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def _communicators(self) -> list[Communicator]:
        found = (self.replicas, self.reducing, self.sharing, self.everyone)
        return list(dict.fromkeys(one for one in found if one is not None))

    def hold_together(self) -> "Ranks":
        """Let a failure of one communicator reach the ranks of the others; return these ranks."""
        for one in self._communicators:
            one.companions = [other for other in self._communicators if other is not one]
        return self

    def close(self) -> None:
        """Close the communicators."""
        for communicator in self._communicators:
            communicator.close()
