"""The communicator of an axis with one rank: nothing to send, every handle is finished."""

from collections.abc import Callable, Sequence

from torch import Tensor

from drivetrain.collectives.communicator import Communicator, Reduction, flatten
from drivetrain.collectives.handles import Deferred, Finished, Handle
from drivetrain.collectives.volume import Chunks, Parts, checked_chunks, checked_parts


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

    def reduce_parts(
        self,
        parts: Parts,
        *,
        scale: float = 1.0,
        label: str = "",
        first: Callable[[], None] | None = None,
    ) -> Handle:
        """Multiply by the scale, after ``first``."""
        if first is not None:
            first()
        for tensor in checked_parts(parts, self.size)[0]:
            self._scaled(tensor, scale)
        return Finished()

    def all_to_all(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        label: str = "",
        first: Callable[[], None] | None = None,
    ) -> Handle:
        """Return a handle that only calls ``first``: there is nobody to send to."""
        return Finished() if first is None else Deferred(first)

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
