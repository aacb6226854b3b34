"""The contents of a checkpoint from one rank, staged copies of them, and all scalars joined."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from drivetrain.checkpoint.assembly import fits, numel
from drivetrain.checkpoint.plain import decode, encode
from drivetrain.errors import CheckpointError
from drivetrain.shards import Shard, label

T = TypeVar("T")

Scalars = Mapping[int, Mapping[str, Mapping[str, Any]]]
"""State of one model that is no tensor: optimizer -> parameter name -> state key -> plain value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The tensors and the state that a rank saves.

    Attributes:
        models: for each prepared model the shards of this rank; over all ranks each element once.
        scalars: for each model the optimizer state of this rank that is no tensor; the shares of
            the ranks are joined, and must be equal where ranks overlap.
        aliases: for each model the further names of tied parameters -> the name of their shards.
        state: plain values that are the same on all ranks (rank 0's are stored): schedulers,
            epoch, loader positions, custom objects.
        rank_state: tensors of this rank alone, such as its random-number states.
        encoded: files with bytes that only the user can read, by file name (rank 0's are stored).
        parameters: for each model the names whose values must be finite for the checkpoint to count
            as finite; buffers may hold infinity on purpose.
    """

    models: Sequence[Iterable[Shard]]
    scalars: Sequence[Scalars] = ()
    aliases: Sequence[Mapping[str, str]] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Tensor] = field(default_factory=dict)
    encoded: Mapping[str, bytes] = field(default_factory=dict)
    parameters: Sequence[Collection[str]] = ()

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shards; only for contents that hold lists of them, as ``staged`` returns."""
        return sum(shard.tensor.nbytes for shards in self.models for shard in shards)

    def copied_kinds(self) -> list[tuple[torch.dtype, torch.Size]]:
        """Return dtype and shape of each copy that ``staged`` makes, in its order.

        All shards are walked, which may communicate, and uses up the contents.
        """
        return [
            (shard.tensor.dtype, shard.tensor.shape)
            for shards in self.models
            for shard in shards
            if not shard.fresh
        ]

    def staged(
        self, write: Callable[[int, Shard], None], copy: Callable[[Tensor], Tensor]
    ) -> "Contents":
        """Return a copy in host memory, of this rank's shards and nothing more.

        The copy takes as many bytes as the shards that lie in memory. All shards are walked
        whatever happens: yielding one may communicate. Fresh shards, which are copies already, go
        to ``write`` with the index of their model: there may be no room for a second copy, so the
        returned contents lack them. The others are copied by ``copy``.

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
                        copies.append(replace(shard, tensor=copy(shard.tensor)))
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
            parameters=self.parameters,
        )


def _snapshot(value: T, where: str) -> T:
    """Return a value as a load would give it back: a copy without shared memory."""
    tensors: dict[str, Tensor] = {}
    body = encode(value, where, tensors)
    copied: T = decode(body, {key: _copy(tensor) for key, tensor in tensors.items()})
    return copied


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def check_shard(shard: Shard) -> None:
    """Refuse a shard whose tensor is not the part that the shard names."""
    fine = fits(shard.part, shard.shape) and numel(shard.part) == shard.tensor.numel()
    if not fine:
        raise CheckpointError(
            f"the strategy's shard of {label(shard.name, shard.state)} has {shard.tensor.numel()} "
            f"of {math.prod(shard.shape)} elements, which does not match its {shard.part}"
        )


def merge_scalars(ranks: Sequence[Sequence[Scalars]]) -> list[dict[Any, Any]]:
    """Join the scalars of all ranks, model by model; ranks with the same key need equal values."""
    counts = [len(models) for models in ranks]
    if len(set(counts)) > 1:
        raise CheckpointError(f"expected the same number of models on all ranks, found {counts}")
    merged: list[dict[Any, Any]] = [{} for _ in ranks[0]]
    for rank, models in enumerate(ranks):
        for index, model in enumerate(models):
            _join(merged[index], model, rank, f"scalars[{index}]")
    return merged


def _join(into: dict[Any, Any], more: Mapping[Any, Any], rank: int, where: str) -> None:
    for key, value in more.items():
        path = f"{where}[{key!r}]"
        known = into.get(key)
        if key not in into:
            into[key] = _copied_dicts(value)
        elif isinstance(known, dict) and isinstance(value, Mapping):
            _join(known, value, rank, path)
        elif not _equal(known, value):
            raise CheckpointError(
                f"ranks disagree on {path}: rank {rank} has {value!r}, a lower rank {known!r}; "
                "optimizer state that is not sharded must be the same on all ranks"
            )


def _copied_dicts(value: Any) -> Any:
    """Copy the dicts, which later ranks add to."""
    if not isinstance(value, dict):
        return value
    return {key: _copied_dicts(item) for key, item in value.items()}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
