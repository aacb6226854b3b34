"""The errors that methods for slow links keep, in the checkpoint of all workers.

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

from drivetrain.collectives import Communicator
from drivetrain.links.kept import take_kept
from drivetrain.log import get_logger
from drivetrain.parts.saved_state import LINKS, OWN_MARK
from drivetrain.shards import Part, Reader, Shard

logger = get_logger(__name__)


def marked(shards: Iterable[Shard], whole: Collection[str]) -> Iterator[Shard]:
    """Yield the kept state of whole parameters, under the keys of ``local``.

    Args:
        shards: of the communicator between workers.
        whole: names of parameters that this rank steps as a whole.
    """
    for shard in shards:
        if shard.name in whole:
            yield replace(shard, state=f"{shard.state}{OWN_MARK}")


def go_on_with_kept(
    workers: Communicator, reader: Reader, whole: Collection[str], method: str
) -> None:
    """Let the exchanges of this run go on with the kept state, and say if some is left out.

    Args:
        workers: all of them; the channels of their exchanges are there.
        reader: the checkpoint.
        whole: names of parameters that this rank steps as a whole, and exchanges.
        method: for gradients, in this run.
    """
    take_kept([workers], KeptReader(reader, whole), method)
    left_out = {name for name, state in reader.keys() if _is_kept(state)} - {*whole}  # noqa: SIM118
    if left_out:
        logger.announce(
            f"local: the checkpoint has errors of links.far.gradients for {len(left_out)} "
            "parameters that a rank of this run exchanges in part, or not at all; these errors are "
            "left out"
        )


def _is_kept(state: str) -> bool:
    return state.startswith(LINKS) and state.endswith(OWN_MARK)


class KeptReader:
    """The kept state in a checkpoint of ``local``: implements ``drivetrain.shards.Reader``.

    ``drivetrain.links.kept`` reads it.

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
            if name in whole and _is_kept(state)
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
