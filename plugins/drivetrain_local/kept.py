"""The errors that methods for slow links keep, in the checkpoint of all workers.

Their keys are those of ``drivetrain.links.kept`` with the mark of ``local``: these are errors of
outer gradients, which no other strategy may add to its gradients. Before the mark is the word of
the part that a rank steps, where a replica is divided over ranks::

    weight, links.error.int4.1.0@          of the second worker
    weight, links.error.int4.1.0@0of2@     of its first tensor-parallel rank

A strategy inside that cuts parameters into pieces steps ranges of parts, each with its own key.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.links.kept import take_kept
from drivetrain.log import get_logger
from drivetrain.parts.saved_state import LINKS, OWN_MARK
from drivetrain.shards import Part, Reader, Shard

logger = get_logger(__name__)


def marked(shards: Iterable[Shard], parts: Mapping[str, str]) -> Iterator[Shard]:
    """Yield the kept state of parameters, under the keys of ``local``.

    Args:
        shards: of the communicator between workers.
        parts: the parameters of which this rank steps a part or a range: the word of each part by
            name.
    """
    for shard in shards:
        if shard.name in parts:
            yield replace(shard, state=f"{shard.state}{_mark(parts[shard.name])}")


def _mark(word: str) -> str:
    return f"{OWN_MARK}{word}{OWN_MARK}" if word else OWN_MARK


def go_on_with_kept(
    workers: Communicator,
    ranks: Communicator,
    device: torch.device,
    reader: Reader,
    parts: Mapping[str, str],
    method: str,
) -> None:
    """Let the exchanges of this run go on with the kept state, and say if some is left out.

    Collective.

    Args:
        workers: all of them; the channels of their exchanges are there.
        ranks: of this worker; stages of a pipeline go on with different parameters.
        device: of messages.
        reader: the checkpoint.
        parts: the parameters of which this rank steps a part or a range: the word of each part by
            name.
        method: for gradients, in this run.
    """
    mine = KeptReader(reader, parts)
    take_kept([workers], mine, method)
    kept = sorted({name for name, state in reader.keys() if _is_kept(state)})  # noqa: SIM118
    if not kept:
        return
    taken = {name for name, _ in mine.keys()}  # noqa: SIM118
    flags = torch.tensor([name in taken for name in kept], dtype=torch.uint8).to(device)
    ranks.all_reduce(flags, reduction="max", label="kept errors that go on").wait()
    if left_out := flags.numel() - int(flags.sum()):
        logger.announce(
            f"local: the checkpoint has errors of links.far.gradients for {left_out} "
            "parameters that no rank of this run exchanges in the same parts; these errors are "
            "left out"
        )


def _is_kept(state: str) -> bool:
    return state.startswith(LINKS) and state.endswith(OWN_MARK)


class KeptReader:
    """The kept state in a checkpoint of ``local``: implements ``drivetrain.shards.Reader``.

    ``drivetrain.links.kept`` reads it.

    Args:
        reader: of the checkpoint.
        parts: the parameters of which this rank steps a part or a range: the word of each part by
            name.

    Attributes:
        partial: whether weights that the checkpoint lacks keep their values.
    """

    def __init__(self, reader: Reader, parts: Mapping[str, str]) -> None:
        self.partial = reader.partial
        self._reader = reader
        self._marks = {name: _mark(word) for name, word in parts.items()}
        self._keys = []
        for name, state in reader.keys():  # noqa: SIM118 - no dict
            plain, marked, rest = state.partition(OWN_MARK)
            if _is_kept(state) and self._marks.get(name) == f"{marked}{rest}":
                self._keys.append((name, plain))

    def keys(self) -> Iterable[tuple[str, str]]:
        """Return the (name, state) pairs, without the mark."""
        return self._keys

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._reader.shape(name, f"{state}{self._marks[name]}")

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return one part of a tensor."""
        return self._reader.read(name, f"{state}{self._marks[name]}", part)

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter that is no tensor."""
        return self._reader.scalars(name, optimizer)
