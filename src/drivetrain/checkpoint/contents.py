"""The contents of a checkpoint from one rank, or a copy of them that training does not change."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from drivetrain.checkpoint.plain import decode, encode
from drivetrain.checkpoint.scalars import Scalars
from drivetrain.shards import Shard

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The tensors and the state that a rank saves.

    Attributes:
        models: for each prepared model the shards of this rank; over all ranks each element once.
        scalars: for each model the optimizer state of this rank that is no tensor; what several
            ranks have must be equal, what only some have is joined.
        aliases: for each model the further names of tied parameters -> the name of their shards.
        state: plain values that are the same on all ranks (rank 0's are stored): schedulers,
            epoch, loader positions, custom objects.
        rank_state: tensors of this rank alone, such as its random-number states.
        encoded: files with bytes that only the user can read, by file name (rank 0's are stored).
    """

    models: Sequence[Iterable[Shard]]
    scalars: Sequence[Scalars] = ()
    aliases: Sequence[Mapping[str, str]] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Tensor] = field(default_factory=dict)
    encoded: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shards; only for contents that hold lists of them, as ``staged`` returns."""
        return sum(shard.tensor.nbytes for shards in self.models for shard in shards)

    def staged(self, write: Callable[[int, Shard], None]) -> "Contents":
        """Return a copy in host memory, of this rank's shards and nothing more.

        The copy holds as many bytes as the shards do that lie in memory. All shards are walked
        whatever happens: yielding one may communicate.

        Args:
            write: gets the index of the model and a shard that was copied already, and that there
                may be no room for; the copy will lack it.

        Raises:
            CheckpointError: a state is not plain.
            RuntimeError: there is no memory for the copy.
        """
        models: list[list[Shard]] = []
        failures: list[Exception] = []
        for index, shards in enumerate(self.models):
            copies: list[Shard] = []
            for shard in shards:
                try:
                    if shard.fresh:
                        write(index, shard)
                    elif not failures:
                        copies.append(replace(shard, tensor=_copy(shard.tensor)))
                except (RuntimeError, MemoryError) as error:
                    failures.append(error)
                    models.clear()
                    copies.clear()
            models.append(copies)
        if failures:
            raise failures[0]
        return Contents(
            models=models,
            scalars=_snapshot(list(self.scalars), "scalars"),
            aliases=[dict(names) for names in self.aliases],
            state=_snapshot(dict(self.state), "state"),
            rank_state={key: _copy(tensor) for key, tensor in self.rank_state.items()},
            encoded=dict(self.encoded),
        )


def _snapshot(value: T, where: str) -> T:
    """Return a value as a load would give it back: a copy without shared memory."""
    tensors: dict[str, Tensor] = {}
    body = encode(value, where, tensors)
    copied: T = decode(body, {key: _copy(tensor) for key, tensor in tensors.items()})
    return copied


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
