"""The communicator of an axis with one rank: nothing to send, every handle is finished."""

from collections.abc import Callable

from torch import Tensor

from drivetrain.collectives.communicator import Communicator, Handle, Reduction, flatten
from drivetrain.collectives.parts import Parts, checked_parts
from drivetrain.collectives.volume import Chunks, checked_chunks


class Finished:
    """A handle of an operation that is over."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


class Deferred:
    """A handle whose ``wait`` does the work.

    Args:
        work: called once.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def wait(self) -> None:
        """Do the work, unless it is done."""
        if self._work is not None:
            self._work()
            self._work = None

    def done(self) -> bool:
        """Whether the work is done."""
        return self._work is None


class SoloCommunicator(Communicator):
    """Collectives among one rank: only the scale is applied."""

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        scale: float = 1.0,
        reduction: Reduction = "sum",
        label: str = "",
    ) -> Handle:
        """Multiply by the scale."""
        return self._scaled(tensor, scale)

    def reduce_scatter(
        self, flat: Tensor, *, scale: float = 1.0, chunks: Chunks | None = None, label: str = ""
    ) -> Handle:
        """Multiply by the scale."""
        checked_chunks(chunks, flat.numel(), self.size)
        return self._scaled(flat, scale)

    def all_gather(self, flat: Tensor, *, chunks: Chunks | None = None, label: str = "") -> Handle:
        """Return a finished handle: the only chunk is there."""
        checked_chunks(chunks, flat.numel(), self.size)
        return Finished()

    def gather_parts(
        self, parts: Parts, *, label: str = "", first: Callable[[], None] | None = None
    ) -> Handle:
        """Return a handle that only calls ``first``: all parts are this rank's."""
        checked_parts(parts, self.size)
        return Finished() if first is None else Deferred(first)

    def reduce_parts(self, parts: Parts, *, scale: float = 1.0, label: str = "") -> Handle:
        """Multiply by the scale."""
        for tensor in checked_parts(parts, self.size)[0]:
            self._scaled(tensor, scale)
        return Finished()

    def broadcast(self, tensor: Tensor, source: int = 0, *, label: str = "") -> Handle:
        """Return a finished handle: this rank is the source."""
        return Finished()

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Nothing to release."""

    def _scaled(self, tensor: Tensor, scale: float) -> Handle:
        flat = flatten(tensor)
        if scale != 1.0:
            flat.mul_(scale)
        return Finished()
