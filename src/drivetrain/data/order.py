"""The order of an epoch: the samples, or the batches, of all ranks together.

The order is a function of one number, the epoch's seed, and of the user's sampler. Every rank makes
the order for itself; with a sampler unknown to the library, the ranks check that their orders are
equal.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from drivetrain.errors import UsageError
from drivetrain.runtime import rng


class Permutation(Sequence[int]):
    """The numbers 0 to n - 1 in an order that depends on a seed alone, 8 bytes each."""

    def __init__(self, n: int, seed: int) -> None:
        generator = torch.Generator()
        generator.manual_seed(seed)
        self._indices: Tensor = torch.randperm(n, generator=generator, device="cpu")  # (n,) int64

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found: int | list[int] = self._indices[index].tolist()
        return found


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
        return iter(Permutation(len(self), self.seed + self.epoch))

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
            return Permutation(len(self), seed)
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
    digest = hashlib.blake2b(digest_size=8)
    digest.update(_bytes(order))
    return int.from_bytes(digest.digest(), "little") >> 1


def _bytes(order: Sequence[Any]) -> bytes:
    try:
        return array("q", order).tobytes()
    except TypeError:  # batches, or keys that are no integers
        return repr(order).encode()


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
