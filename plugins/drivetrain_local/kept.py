"""What methods for slow links keep from exchange to exchange, in the checkpoint of all workers.

Their keys are those of ``drivetrain.links.kept`` with the mark of ``local``: these are errors of
outer gradients, which no other strategy may add to its gradients::

    weight, links.error.int4.1.0@     of the second worker

A strategy inside that divides parameters has errors of its ranks' parts, which nobody else could
use: only errors of whole parameters are saved.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from drivetrain.parts.saved_state import LINKS, OWN_MARK
from drivetrain.shards import Part, Reader, Shard


def marked(shards: Iterable[Shard], whole: Collection[str]) -> Iterator[Shard]:
    """Yield what methods have kept for whole parameters, under the keys of ``local``.

    Args:
        shards: of the communicator between workers.
        whole: names of parameters that this rank steps as a whole.
    """
    for shard in shards:
        if shard.name in whole:
            yield replace(shard, state=f"{shard.state}{OWN_MARK}")


class KeptReader:
    """What methods have kept, for ``drivetrain.links.kept``; a ``drivetrain.shards.Reader``.

    Args:
        reader: of the checkpoint.
        whole: names of parameters that this rank steps as a whole.

    Attributes:
        partial: whether weights that the checkpoint lacks keep their values.
    """

    def __init__(self, reader: Reader, whole: Collection[str]) -> None:
        self.partial = reader.partial
        self._reader = reader
        self._keys = [
            (name, state.removesuffix(OWN_MARK))
            for name, state in reader.keys()  # noqa: SIM118 - no dict
            if name in whole and state.startswith(LINKS) and state.endswith(OWN_MARK)
        ]

    def keys(self) -> Iterable[tuple[str, str]]:
        """Return the (name, state) pairs, without the mark."""
        return self._keys

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._reader.shape(name, f"{state}{OWN_MARK}")

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return one part of a tensor."""
        return self._reader.read(name, f"{state}{OWN_MARK}", part)

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter that is no tensor."""
        return self._reader.scalars(name, optimizer)
