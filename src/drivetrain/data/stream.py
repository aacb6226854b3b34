"""A stream that ranks read as its first samples ask for: one stream for all, or parts.

When the first pass begins, ranks compare their first samples. Alike, they are one stream, which is
divided. A dataset that divides itself over the ranks gives each rank samples of its own: these are
not divided again. Ranks may also read the same samples in random orders of their own.
"""

import dataclasses
import hashlib
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.collectives.digests import differing
from drivetrain.collectives.facts import gather_facts
from drivetrain.config import DataConfig
from drivetrain.data.dispatch import DispatchSource
from drivetrain.data.division import OrderDivision, SampleDivision
from drivetrain.data.iterable_source import IterableSource
from drivetrain.data.steps import BatchSource, GlobalStep, Start
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World

logger = get_logger(__name__)

SAMPLES, MORE = 32, 256
"""So many first samples of each rank are compared; where they differ, so many in all."""

SEED = 20150501
"""Of the generators, where a stream is read once more: any would do."""


class _Kind(Enum):
    """What ranks read: the same samples, in one order or in several, or parts of them."""

    SAME, SHUFFLED, PARTS, UNKNOWN = range(4)


class StreamSource:
    """Reads a stream in one of several ways, chosen when the first pass begins. Collective then.

    Args:
        loader: the user's loader.
        division: how a global batch is divided.
        axis: the data-parallel axis.
        world: all ranks.
        config: of the loader; ``dispatch_batches`` is None, or False: every rank reads.
        on_device: leave received batches on the device of the group.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        division: SampleDivision,
        axis: Axis,
        world: World,
        config: DataConfig,
        *,
        on_device: bool,
    ) -> None:
        self._user = loader
        self._axis = axis
        self._world = world
        self._looked = False
        self._dispatches = config.dispatch_batches is None and world.size > 1
        ranks = tuple(range(axis.size)) if self._dispatches else (axis.rank,)
        self._own = IterableSource(loader, division, ranks=ranks)
        self._source: BatchSource = self._own
        if self._dispatches:
            self._source = DispatchSource(self._own, world, axis.rank, on_device=on_device)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def is_dispatched(self) -> bool:
        """Whether rank 0 reads for all, as long as ranks are not seen to read parts."""
        return self._source.is_dispatched

    @property
    def division(self) -> OrderDivision:
        """How the order is divided."""
        return self._source.division

    @division.setter
    def division(self, division: OrderDivision) -> None:
        self._source.division = division

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of the workers; the order is the dataset's own affair."""
        return seed + epoch

    def batches(self, rank: int, seed: int, epoch: int) -> int:
        """Return the batches of a rank in a full epoch; TypeError without a length."""
        return self._source.batches(rank, seed, epoch)

    def steps(self, start: Start) -> Iterator[GlobalStep]:
        """Read the rest of an epoch.

        Raises:
            UsageError: ranks read different samples, and nothing tells whether these are parts.
        """
        if not self._looked:
            self._looked = True
            self._choose(start)
        return self._source.steps(start)

    def _choose(self, start: Start) -> None:
        kind, name, division = self._look(start), type(self._user.dataset).__name__, self.division
        if kind is _Kind.PARTS:
            logger.announce(
                f"the samples of {name} differ between ranks: each rank reads its own part, which "
                "is not divided again"
            )
            self._source = self._part(self._user.dataset, self._own.begun)
        elif kind is _Kind.UNKNOWN:
            raise UsageError(
                f"expected the same first samples of {name} on all ranks, or others on each rank, "
                "as the same code gives them again, found neither: nothing tells whether ranks "
                "read parts, or all samples in an order of their own; set dispatch_batches=True to "
                "deal out what rank 0 reads, or False if each rank reads a part of its own; ranks "
                "that share a batch must read alike"
            )
        elif kind is _Kind.SHUFFLED and not self._dispatches:
            raise UsageError(
                f"expected {name} in one order on all ranks with dispatch_batches=False, found an "
                "order of its own on each; leave dispatch_batches unset, or seed the order alike"
            )
        elif self._dispatches:
            self._own.begun = self._own.begun if self._world.is_main else None
        elif not division.even and _can_shard(self._user, self._axis.size):
            dataset: Any = self._user.dataset
            size, index = self._axis.size, self._axis.rank
            self._source = self._part(dataset.shard(num_shards=size, index=index), None)

    def _part(self, dataset: Any, begun: Iterator[Any] | None) -> IterableSource:
        ranks = (self._axis.rank,)
        return IterableSource(self._user, self.division, ranks=ranks, part=dataset, begun=begun)

    def _look(self, start: Start) -> _Kind:
        """Compare the first samples of all ranks. Collective."""
        if self._world.size == 1:
            return _Kind.SAME
        doing = "the comparison of a stream's first samples"
        if not differing((json.dumps(_marks(self._own.first(start, SAMPLES))),), doing=doing):
            return _Kind.SAME
        mine = _marks(self._own.first(start, MORE))
        found = gather_facts(mine, list[int], doing=doing, operation="first samples")
        if _are_shuffled(found):
            return _Kind.SHUFFLED
        # Is it for random numbers alone? Then ranks read alike once these are seeded alike.
        once, twice = (_marks(self._own.again(SEED, SAMPLES)) for _ in "12")
        doing = "the second comparison of a stream's first samples"
        if not differing((json.dumps(once),), doing=doing):
            return _Kind.SHUFFLED
        steady = all(gather_facts(once == twice, bool, doing=doing))
        sure = steady or not self._dispatches  # a script that lets each rank read knows
        return _Kind.PARTS if sure and self._are_parts(found) else _Kind.UNKNOWN

    def _are_parts(self, found: Sequence[Sequence[int]]) -> bool:
        """Whether ranks of one index read alike, and others read others. Collective."""
        places = gather_facts(self._axis.rank, int, doing="the comparison of parts of a stream")
        pairs = {(place, tuple(each)) for place, each in zip(places, found, strict=True)}
        texts = [each for _, each in pairs if each]
        return len(pairs) == self._axis.size and len(texts) == len(set(texts))


def _can_shard(loader: DataLoader[Any], size: int) -> bool:
    """Whether the dataset can give each rank a shard of its own."""
    dataset: Any = loader.dataset
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", 0))
    return size > 1 and callable(getattr(dataset, "shard", None)) and count >= size


def _are_shuffled(found: Sequence[Sequence[int]]) -> bool:
    """Whether ranks have samples in common, at other places, or all of them."""
    if max(map(len, found)) < MORE and len({tuple(sorted(each)) for each in found}) == 1:
        return True
    if any(len(set(each)) < len(each) for each in found):
        return False  # samples occur several times: that two ranks have one means nothing
    places = [{mark: place for place, mark in enumerate(each)} for each in found]
    first = places[0]
    return any(first.get(mark, at) != at for each in places[1:] for mark, at in each.items())


def _marks(samples: Sequence[Any]) -> list[int]:
    return [fingerprint_of(sample) for sample in samples]


def fingerprint_of(sample: Any) -> int:
    """Return a 63-bit hash of a sample, equal for samples with equal values."""
    digest = hashlib.blake2b(digest_size=8)
    for part in _parts(sample):
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1


def _parts(value: Any) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield repr(value).encode()
    elif isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif callable(as_bytes := getattr(value, "tobytes", None)):  # arrays and images
        yield as_bytes()
    else:
        with suppress(Exception):  # then its class must do
            yield pickle.dumps(value)
