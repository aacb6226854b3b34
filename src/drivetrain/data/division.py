"""The order of an epoch, and the part of it that each rank gets in each global step.

The order is a function of one number, the epoch's seed, and of the user's sampler. Every rank makes
the order for itself; with a sampler unknown to the library, the ranks check that their orders are
equal.
"""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice
from math import ceil
from typing import Any, ClassVar, cast

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler
from typing_extensions import override

from drivetrain.errors import UsageError
from drivetrain.runtime import rng


def permutation(n: int, seed: int) -> Sequence[int]:
    """Return the numbers 0 to n - 1 in an order that depends on a seed alone, 8 bytes each."""
    generator = torch.Generator().manual_seed(seed)
    order = array("q", bytes(8 * n))
    if n:
        memory = torch.frombuffer(order, dtype=torch.int64)
        torch.randperm(n, generator=generator, device="cpu", out=memory)
    return order


class SeedableRandomSampler(Sampler[int]):
    """Shuffles by seed + epoch: another order every epoch, the same on every rank.

    Args:
        data_source: anything with a length.
        seed: seed of epoch 0.
    """

    def __init__(self, data_source: Any, seed: int = 0) -> None:
        self.data_source = data_source
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(len(self), self.seed + self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch


class EpochOrder:
    """Works out the order of an epoch from the user's sampler or batch sampler, with a length."""

    def __init__(self, sampler: Any) -> None:
        if not callable(getattr(sampler, "__len__", None)):
            raise UsageError(
                f"expected a sampler with a length, found {type(sampler).__name__} without; give "
                "it __len__, or use an IterableDataset for an endless stream"
            )
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def is_fixed(self) -> bool:
        """Whether the order needs no seed."""
        return type(self._sampler) is SequentialSampler

    @property
    def is_known(self) -> bool:
        """Whether the library makes the order itself, so that ranks cannot disagree."""
        sampler = self._sampler
        plain = type(sampler) is RandomSampler and not sampler.replacement
        return self.is_fixed or (plain and sampler.num_samples == len(sampler.data_source))

    def draw_seed(self, generator: torch.Generator | None) -> int:
        """Draw an epoch's seed from the user's sampler's generator, or else from the loader's."""
        source = next(generators(self._sampler), generator)
        device = "cpu" if source is None else source.device
        seed = torch.empty((), dtype=torch.int64, device=device).random_(generator=source)
        return int(seed.item())

    def draw(self, seed: int, epoch: int) -> Sequence[Any]:
        """Return the order of an epoch.

        A sampler that the library does not know is iterated while every generator, also its own,
        is seeded; their former states come back afterwards.
        """
        if self.is_fixed:
            return range(len(self))
        if self.is_known:
            return permutation(len(self), seed)
        forward_epoch(self._sampler, epoch)
        with rng.fork(seed), _seeded(self._sampler, seed):
            return list(self._sampler)


def forward_epoch(user_object: Any, epoch: int) -> None:
    """Tell an object of the user, and the samplers inside it, which epoch starts."""
    for member in _nested(user_object):
        set_epoch: Callable[[int], None] | None = getattr(member, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def fingerprint(order: Sequence[Any]) -> int:
    """Return a 63-bit hash of an order of samples or batches."""
    try:
        return hashed([array("q", order).tobytes()])
    except TypeError:  # batches, or keys that are no integers
        return hashed([repr(order).encode()])


def hashed(parts: Iterable[bytes]) -> int:
    """Return a 63-bit hash of the parts of something."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1


def _nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and all samplers wrapped in it."""
    seen: set[int] = set()
    waiting = [sampler]
    while waiting:
        member = waiting.pop()
        if member is None or id(member) in seen:
            continue
        seen.add(id(member))
        yield member
        waiting += [getattr(member, name, None) for name in ("sampler", "batch_sampler")]


def generators(*owners: Any) -> Iterator[torch.Generator]:
    """Yield the generators of loaders, datasets and samplers, and of the samplers inside them."""
    for member in chain.from_iterable(map(_nested, owners)):
        generator = getattr(member, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


@contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    before = [(generator, generator.get_state()) for generator in generators(sampler)]
    for generator, _ in before:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


# --- the parts of ranks ---

# A *position* counts the samples of the order that all ranks together have consumed, or the batches
# of the user's own batch sampler. A global step at a position takes the next ``stride`` of them; it
# does not matter with how many ranks the position was reached.


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderDivision(ABC):
    """How an order is divided over ranks.

    Attributes:
        unit: the positions of the order: samples, or batches.
        size: number of ranks.
        even: fill the last step for every rank by going back to the first samples of the order.
        drop_last: leave out a last step that is not full for every rank.
        fills: where the last step is even, fill batches of samples; False repeats one sample for
            ranks without any.
    """

    unit: ClassVar[str]

    size: int
    even: bool
    drop_last: bool
    fills: bool = True

    @property
    @abstractmethod
    def stride(self) -> int:
        """Positions that one global step consumes."""

    @property
    @abstractmethod
    def total_batch_size(self) -> int | None:
        """Samples of one global step; None when the batches have no fixed size."""

    @abstractmethod
    def steps(self, total: int, rank: int) -> int:
        """Return the batches of a rank in an epoch of ``total`` positions."""

    @property
    def may_lack_shares(self) -> bool:
        """Whether the last step may have no batch for some ranks, as the order alone can tell."""
        return False

    @abstractmethod
    def has(self, order: Sequence[Any], position: int, rank: int) -> bool:
        """Whether the global step at a position holds a batch for a rank."""

    @abstractmethod
    def share(self, order: Sequence[Any], position: int, rank: int) -> list[Any]:
        """Return a rank's samples of the global step at a position; empty when it has none.

        Raises:
            UsageError: a batch has a size that cannot be divided or filled.
        """

    @abstractmethod
    def real(self, order: Sequence[Any], position: int, rank: int) -> int:
        """Return how many samples of a rank's share are no repetitions."""

    @abstractmethod
    def remainder(self, order: Sequence[Any], position: int) -> int:
        """Return the real samples of the step at a position when it is filled up, else -1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDivision(OrderDivision):
    """Divides an order of samples into batches of one size.

    Attributes:
        batch_size: samples per rank and step.
    """

    unit: ClassVar[str] = "samples"

    batch_size: int

    @property
    @override
    def stride(self) -> int:
        return self.size * self.batch_size

    @property
    @override
    def total_batch_size(self) -> int | None:
        return self.stride

    @override
    def steps(self, total: int, rank: int) -> int:
        if self.drop_last:
            return total // self.stride
        skipped = 0 if self.even else rank * self.batch_size
        return max(0, ceil((total - skipped) / self.stride))

    @override
    def has(self, order: Sequence[Any], position: int, rank: int) -> bool:
        if self.drop_last:
            return position + self.stride <= len(order)
        first = position if self.even else position + rank * self.batch_size
        return first < len(order)

    @override
    def share(self, order: Sequence[Any], position: int, rank: int) -> list[Any]:
        begin = position + rank * self.batch_size
        end = begin + self.batch_size
        if not self.fills:
            end = begin + max(1, self.real(order, position, rank))
        if end <= len(order) or not self.even:
            return list(order[begin:end])
        return [order[index % len(order)] for index in range(begin, end)]

    @override
    def real(self, order: Sequence[Any], position: int, rank: int) -> int:
        return max(0, min(self.batch_size, len(order) - position - rank * self.batch_size))

    @override
    def remainder(self, order: Sequence[Any], position: int) -> int:
        real = len(order) - position
        return real if self.even and not self.drop_last and real < self.stride else -1


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDivision(OrderDivision):
    """Divides an order of batches that the user's own batch sampler made.

    Attributes:
        batch_size: samples of each batch but the last, which ``split`` needs; None when batches
            vary: then ``even`` repeats whole batches.
        split: divide every batch over the ranks, instead of giving whole batches in turn.
    """

    unit: ClassVar[str] = "batches"

    batch_size: int | None
    split: bool

    @property
    @override
    def stride(self) -> int:
        return 1 if self.split else self.size

    @property
    @override
    def total_batch_size(self) -> int | None:
        return None if self.batch_size is None else self.batch_size * self.stride

    @property
    @override
    def may_lack_shares(self) -> bool:
        return self.split and not self.even

    @override
    def steps(self, total: int, rank: int) -> int:
        if self.split:
            return total
        if self.drop_last:
            return total // self.size
        return max(0, ceil((total - (0 if self.even else rank)) / self.size))

    @override
    def has(self, order: Sequence[Any], position: int, rank: int) -> bool:
        if self.drop_last and position + self.stride > len(order):
            return False
        if self.even:
            return position < len(order)
        if self.split:
            return position < len(order) and bool(self.share(order, position, rank))
        return position + rank < len(order)

    @override
    def share(self, order: Sequence[Any], position: int, rank: int) -> list[Any]:
        if not self.split and not self.even:
            return list(order[position + rank]) if position + rank < len(order) else []
        if self._repeats_batches:
            return list(order[(position + rank) % len(order)])
        samples = list(chain.from_iterable(self._batches(order, position)))
        if self.even:
            samples = filled(samples, chain.from_iterable(order), self._full_size * self.stride)
        width = self._width(len(samples), is_last=position == len(order) - 1)
        return samples[rank * width : (rank + 1) * width]

    @override
    def real(self, order: Sequence[Any], position: int, rank: int) -> int:
        if not self.even:
            return len(self.share(order, position, rank))
        if self._repeats_batches:
            return len(order[position + rank]) if position + rank < len(order) else 0
        width = self._full_size * self.stride // self.size
        held = sum(len(batch) for batch in self._batches(order, position))
        return max(0, min(width, held - rank * width))

    @override
    def remainder(self, order: Sequence[Any], position: int) -> int:
        if not self.even or (self.drop_last and position + self.stride > len(order)):
            return -1
        real = sum(len(batch) for batch in self._batches(order, position))
        if self._repeats_batches:
            return real if position + self.stride > len(order) else -1
        return real if real < self._full_size * self.stride else -1

    @property
    def _repeats_batches(self) -> bool:
        return self.even and self.batch_size is None

    @property
    def _full_size(self) -> int:
        return cast(int, self.batch_size)  # where batches vary, they are neither split nor filled

    def _width(self, samples: int, *, is_last: bool) -> int:
        """Return the samples per rank of a step that holds so many."""
        if is_last and samples < self._full_size * self.stride:
            samples = self._full_size * self.stride
        if samples % self.size:
            raise UsageError(
                f"expected batches that divide over {self.size} ranks with split_batches, found "
                f"one of {samples} samples; change the batch sampler or set split_batches=False"
            )
        return samples // self.size

    def _batches(self, order: Sequence[Any], position: int) -> Sequence[Sequence[Any]]:
        batches = order[position : position + self.stride]
        if self.even and not self._repeats_batches:
            for index, batch in enumerate(batches, start=position):
                is_last = index == len(order) - 1
                if len(batch) > self._full_size or (len(batch) < self._full_size and not is_last):
                    raise UsageError(
                        f"expected {self._full_size} samples in every batch but the last with "
                        f"even_batches, found {len(batch)} in batch {index} of {len(order)}; "
                        "set even_batches=False for batches of varying size"
                    )
        return batches


def filled(samples: list[Any], source: Iterable[Any], size: int) -> list[Any]:
    """Return samples, filled up to a size with the first ones of a source, over and over."""
    return [*samples, *islice(cycle(source), max(0, size - len(samples)))]
