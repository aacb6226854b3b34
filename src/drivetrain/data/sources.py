"""Sources of batches: how a rank reads its part of a dataset with indices, and the rows it has.

Samples repeat where the last batches of an epoch are filled up. A collate function may make more or
fewer rows than samples, so rows are counted in the batch itself.
"""

import copy
import random
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from types import FrameType, MethodType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from drivetrain import communication
from drivetrain.collectives.facts import gather_facts
from drivetrain.data.division import EpochOrder, OrderDivision, fingerprint, forward_epoch
from drivetrain.errors import CheckpointError, RankMismatchError, UsageError
from drivetrain.nested import recursively_apply
from drivetrain.runtime import rng
from drivetrain.runtime.world import World, is_launched


class Rows(NamedTuple):
    """The rows of a rank's batch.

    Attributes:
        whole: all of them.
        real: the first so many do not repeat samples of the epoch.
    """

    whole: int
    real: int

    def kept(self, data: Any, *, objects: bool) -> Any:
        """Return what was made of the batch without what was made of its repetitions.

        Args:
            data: tensors or objects in containers, with one or several rows for each of the batch;
                what has no rows is left out where the whole batch repeats samples.
            objects: whether lists may hold rows; else they hold tensors with rows.

        Raises:
            UsageError: the rows cannot be told apart.
        """
        if self.real == self.whole:
            return data

        def has_rows(item: Any) -> bool:
            return _is_array(item) or (objects and _is_list_of_rows(item, self.whole))

        return recursively_apply(self._first, data, test_type=has_rows)

    def part(self, start: int, stop: int, of: int) -> "Rows":
        """Return the rows of a piece of the batch, or of what has several rows for each of it.

        Args:
            start: first row of the piece.
            stop: one past its last.
            of: how many rows all pieces have.

        Raises:
            UsageError: the pieces are not of this batch, and it repeats samples.
        """
        if self.real == self.whole:
            return Rows(stop - start, stop - start)
        if not self.whole or of % self.whole:
            raise UsageError(
                f"expected pieces of the batch at hand, which has {self.whole} rows, found pieces "
                f"of {of} rows: the last {self.whole - self.real} rows of this batch only repeat "
                "samples; pass micro_batches() this batch, or take gather()"
            )
        real = of // self.whole * self.real
        return Rows(stop - start, min(max(real - start, 0), stop - start))

    def _first(self, data: Any) -> Any:
        if not isinstance(data, list | tuple) and not data.shape:
            return data.reshape(1)[:0] if not self.real else data
        count = len(data)
        if count == 1 != self.whole:  # one value of this rank
            return data if self.real else data[:0]
        if count % self.whole and self.real:
            raise UsageError(
                f"expected as many rows as the batch at hand has, {self.whole}, or a multiple, "
                f"found {count}: the last {self.whole - self.real} rows of this batch only repeat "
                "samples, and nothing tells which of yours belong to them; pass values of all "
                "rows, or take gather() or pad_across_processes() for what has no rows"
            )
        return data[: count // self.whole * self.real]


class RowCount:
    """Counts the rows of the batches of one rank in one epoch."""

    def __init__(self) -> None:
        self._alike = True

    def of(self, batch: Any, samples: int, real: int, again: Callable[[int], Any]) -> Rows:
        """Return the rows of the next batch.

        Args:
            batch: as the script gets it.
            samples: how many the batch was made of.
            real: the first so many of them are no repetitions.
            again: makes a batch of the first so many samples; called where a batch repeats samples,
                and rows are not samples.
        """
        whole = count_rows(batch, samples)
        self._alike = self._alike and whole == samples
        if real in (0, samples):
            return Rows(whole, whole if real else 0)
        return Rows(whole, real if self._alike else min(whole, count_rows(again(real), real)))


def count_rows(batch: Any, samples: int = 0, *, otherwise: int = 1) -> int:
    """Return the rows of a batch: of its first tensor or list with any.

    Args:
        batch: tensors and lists in containers.
        samples: a list with so many items is a list of samples, unless its items have as many rows.
        otherwise: where there are none.
    """
    found = _rows_of(batch)
    if isinstance(batch, list) and len(batch) == samples != found:
        return samples
    return otherwise if found is None else found


def _rows_of(data: Any) -> int | None:
    if _is_array(data):
        return int(data.shape[0]) if data.shape else None
    if isinstance(data, Mapping):
        data = tuple(data.values())
    elif hasattr(data, "__dataclass_fields__"):
        data = tuple(getattr(data, name) for name in data.__dataclass_fields__)
    if not isinstance(data, list | tuple):
        return None
    found = next((rows for rows in map(_rows_of, data) if rows is not None), None)
    return len(data) if found is None and isinstance(data, list) else found


def _is_array(data: Any) -> bool:
    """Whether something is a tensor, or an array of another library."""
    return isinstance(getattr(data, "shape", None), tuple)


def _is_list_of_rows(data: Any, whole: int) -> bool:
    """Whether a list holds one item for each row, and not parts that have rows each."""
    if not isinstance(data, list | tuple) or hasattr(data, "_fields") or not data:
        return False
    if all(isinstance(item, Mapping) for item in data):
        return len(data) % whole == 0
    return not all(_rows_of(item) == whole for item in data)


# --- worker processes of a loader live through a scheduler's notice ---

# Schedulers signal all processes of a job. A worker that died of it would fail the rank before the
# rank has saved.


WorkerStart: TypeAlias = Callable[[int], None] | None
"""A loader's ``worker_init_fn``."""


def outlive_notices(start: WorkerStart, worker: int) -> None:
    """Start a loader's worker, so that it lives through a notice.

    A second SIGTERM ends a worker: python sends one more to a worker that does not end.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore_once)
    if start is not None:
        start(worker)


def _ignore_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


# --- samples that the library reads for itself ---

# Generators, counters and lists of the dataset are afterwards as they were.


def collated(loader: DataLoader[Any], rows: list[Any]) -> Any:
    """Return rows of a dataset as the loader makes a batch of them, here and now.

    With batch_size=None they are handed to the dataset whole, or one alone.
    """
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        takes_lists = isinstance(loader.sampler, BatchSampler)
        return loader.collate_fn(dataset[rows if takes_lists else rows[0]])
    at_once = getattr(dataset, "__getitems__", None)
    found = [dataset[row] for row in rows] if at_once is None else at_once(rows)
    return loader.collate_fn(found)


@contextmanager
def without_trace(*objects: Any) -> Iterator[None]:
    """Context after which attributes of datasets and collations have their former values.

    A file that the dataset opens at its first row would else be open in all worker processes.
    """
    saved = [(vars(member), dict(vars(member))) for member in _members(objects)]
    try:
        for attributes, before in saved:
            attributes.update({name: _copied(value) for name, value in before.items()})
        yield
    finally:
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)


def _members(objects: Sequence[Any]) -> Iterator[Any]:
    """Yield objects with attributes, and the datasets inside of datasets."""
    waiting, seen = [*objects], set[int]()
    while waiting:
        member = waiting.pop()
        if isinstance(member, MethodType):
            member = member.__self__
        if id(member) in seen or isinstance(member, type) or not hasattr(member, "__dict__"):
            continue
        seen.add(id(member))
        yield member
        for value in vars(member).values():
            parts = value if isinstance(value, list | tuple) else [value]
            if parts and isinstance(parts[0], Dataset):  # not millions of samples
                waiting += parts


def _copied(value: Any) -> Any:
    """Return a copy of a list, a dict or a generator, and other values themselves."""
    if type(value) in (list, dict, set, deque):
        return copy.copy(value)
    own = isinstance(value, torch.Generator | random.Random)
    numpys = type(value).__module__.startswith("numpy.random")
    return copy.deepcopy(value) if own or numpys else value


# --- what sources tell the loader, and the plain loader that they read from ---


class OrderIdentity(NamedTuple):
    """The order that a saved position belongs to; the position means nothing in another order.

    Attributes:
        total: positions in the order; None for a stream.
        fingerprint: hash of an order that the user's own sampler made, else None.
        shards: number of shards of a stream that each rank reads by itself.
    """

    total: int | None = None
    fingerprint: int | None = None
    shards: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where an epoch starts.

    Attributes:
        epoch: index of the epoch.
        seed: of the order.
        position: samples or batches of the order that are consumed already.
        identity: the order that the position was counted in; None for the start of an epoch.
        dataset_state: of the dataset itself at this position; None for a dataset without state.
        aside: whether another pass of the same loader is under way, which must notice nothing; this
            one may be of one rank alone.
    """

    epoch: int
    seed: int
    position: int = 0
    identity: OrderIdentity | None = None
    dataset_state: Any = None
    aside: bool = False


class RankBatch(NamedTuple):
    """A rank's batch of a global step.

    Attributes:
        batch: as the collate function made it.
        last: whether the rank has no more batch in the epoch.
        rows: those that repeat samples; None where no batch of the epoch repeats any.
    """

    batch: Any
    last: bool
    rows: Rows | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalStep:
    """One global step.

    Attributes:
        shares: of the ranks that the source reads for; None for a rank without a batch.
        start: where the next step starts.
        remainder: real samples of the epoch's last step when it holds repetitions, else -1.
        final: no rank gets anything after this step.
    """

    shares: tuple[RankBatch | None, ...]
    start: Start
    remainder: int
    final: bool


class BatchSource(Protocol):
    """Reads the batches of some ranks, step by step.

    Attributes:
        division: how the order is divided.
    """

    division: OrderDivision

    @property
    def is_dispatched(self) -> bool:
        """Whether rank 0 alone reads, and sends to the others."""

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of the order of an epoch, the same on every rank."""

    def steps(self, start: Start) -> Iterator[GlobalStep]:
        """Read the rest of an epoch."""

    def batches(self, rank: int, seed: int, epoch: int) -> int:
        """Return the batches of a rank in a full epoch."""


def reader_of(
    loader: DataLoader[Any], dataset: Any, generator: torch.Generator, **changes: Any
) -> DataLoader[Any]:
    """Return a plain loader with the settings of the user's, except for the changes.

    Args:
        loader: the user's loader.
        dataset: the loader's dataset, or a shard of the dataset.
        generator: seeds the workers, so that an epoch draws nothing from torch's global state.
        changes: arguments of DataLoader.
    """
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"]
    if loader.num_workers:
        names += ["persistent_workers", "multiprocessing_context", "prefetch_factor"]
    settings = {name: getattr(loader, name) for name in names} | {"generator": generator}
    if loader.num_workers and is_launched():
        settings["worker_init_fn"] = partial(outlive_notices, loader.worker_init_fn)
    return DataLoader(dataset, **settings | changes)


# --- a map-style dataset: the indices of every batch are known before a sample is touched ---


class _Plan:
    """The batches of indices that the loader underneath reads next; replaced every epoch."""

    def __init__(self) -> None:
        self.batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


@dataclass(eq=False)
class MapSource:
    """Reads the batches of some ranks by index.

    Args:
        loader: the user's loader, whose workers, collation and pinning are kept.
        order: the epoch's order over all ranks.
        division: how the order is divided.
        ranks: which ranks to read for.
        seedable: take an epoch's seed from the run's seed; False: from the user's generators.
        world: the ranks that must agree on the order.

    Attributes:
        division: how the order is divided.
        is_dispatched: False: every rank reads for itself.
    """

    loader: DataLoader[Any]
    order: EpochOrder
    division: OrderDivision
    _: KW_ONLY
    ranks: Sequence[int]
    seedable: bool
    world: World
    is_dispatched = False

    def __post_init__(self) -> None:
        self._plan = _Plan()
        self._generator = torch.Generator()
        self._batched = self.loader.batch_sampler is not None
        self._takes_lists = self._batched or isinstance(self.loader.sampler, BatchSampler)
        self._reader = self._make_reader()

    def _make_reader(self, **changes: Any) -> DataLoader[Any]:
        plan: dict[str, Any] = {"batch_sampler": self._plan}
        if not self._batched:  # each item of the plan goes to the dataset whole
            plan = {"sampler": self._plan, "batch_size": None}
        return reader_of(self.loader, self.loader.dataset, self._generator, **plan, **changes)

    def batches(self, rank: int, seed: int, epoch: int) -> int:
        """Return the batches of a rank in a full epoch.

        Where the last batch may be too short for all ranks, the epoch's order tells.
        """
        division, total = self.division, len(self.order)
        most = division.steps(total, rank)
        if not (division.may_lack_shares and most):
            return most
        order = self.order.draw(seed + epoch, epoch)
        return most - (not division.has(order, total - division.stride, rank))

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of an epoch's order; collective when the user's generators decide."""
        if self.seedable or self.order.is_fixed:
            return seed + epoch
        return seed_of_main(self.order.draw_seed(self.loader.generator), self.world)

    def steps(self, start: Start) -> Iterator[GlobalStep]:
        """Read the rest of an epoch, touching no sample before the position.

        Raises:
            CheckpointError: the position was saved in another order.
            RankMismatchError: ranks disagree on the order.
        """
        division = self.division
        if not start.aside:
            forward_epoch(self.loader.dataset, start.epoch)
        order = self.order.draw(start.seed, start.epoch)
        identity = self._identify(order, start)
        stride, position = division.stride, start.position
        last = position + max(0, len(order) - position - 1) // stride * stride
        remainder = division.remainder(order, last) if position < len(order) else -1
        batches = self._read(order, division, start)
        counts = {rank: RowCount() for rank in self.ranks}

        def share(rank: int) -> RankBatch | None:
            if not division.has(order, position, rank):
                return None
            batch, rows = next(batches), None
            if division.even:
                indices = division.share(order, position, rank)
                again = partial(self._again, indices, start.seed)
                real = division.real(order, position, rank)
                rows = counts[rank].of(batch, len(indices), real, again)
            return RankBatch(batch, not division.has(order, following, rank), rows)

        while self._readers(order, division, position):
            following = min(position + stride, len(order))
            shares = tuple(map(share, self.ranks))
            position = following
            yield GlobalStep(
                shares=shares,
                start=replace(start, position=position, identity=identity),
                remainder=remainder,
                final=not self._readers(order, division, position),
            )
        next(batches, None)  # lets the workers see the end of the epoch

    def _again(self, indices: list[Any], seed: int, samples: int) -> Any:
        """Return the first samples of a batch as a batch, leaving no trace."""
        with rng.fork(seed), without_trace(self.loader.dataset, self.loader.collate_fn):
            return collated(self.loader, indices[:samples])

    def _readers(self, order: Sequence[Any], division: OrderDivision, position: int) -> list[int]:
        """Return the ranks that get a batch of the step at a position."""
        return [rank for rank in self.ranks if division.has(order, position, rank)]

    def _identify(self, order: Sequence[Any], start: Start) -> OrderIdentity:
        mark = None
        if not self.order.is_known:
            mark = fingerprint(order)
            if not start.aside:
                check_same_order(mark, self.world)
        identity = OrderIdentity(len(order), mark)
        if start.identity is not None and start.identity != identity:
            raise CheckpointError(
                f"expected the order of {self.division.unit} that the position "
                f"{start.position} was saved in, {start.identity}, found {identity}; resume with "
                "the same dataset and sampler, or start the epoch again with set_epoch("
                f"{start.epoch + 1})"
            )
        return identity

    def _read(self, order: Sequence[Any], division: OrderDivision, start: Start) -> Iterator[Any]:
        """Start the loader underneath; each batch it gives belongs to the next (step, rank)."""
        self._plan.batches = self._indices(order, division, start.position)
        # Seeds the workers; the position keeps a resumed epoch from repeating their numbers.
        self._generator.manual_seed(
            hash((start.seed, start.position, self.ranks[0])) & ((1 << 63) - 1)
        )
        apart = start.aside and self._reader.persistent_workers
        return iter(self._make_reader(persistent_workers=False) if apart else self._reader)

    def _indices(
        self, order: Sequence[Any], division: OrderDivision, position: int
    ) -> Iterator[Any]:
        while readers := self._readers(order, division, position):
            for rank in readers:
                share = division.share(order, position, rank)
                yield share if self._takes_lists else share[0]
            position += division.stride


def seed_of_main(seed: int, world: World) -> int:
    """Return the seed that rank 0 passes; collective when there are other ranks."""
    if world.size == 1:
        return seed
    return int(communication.broadcast(torch.tensor(seed, device="cpu")).item())


def check_same_order(mine: int, world: World) -> None:
    """Compare the fingerprints of the order, and raise on every rank if they differ. Collective."""
    if world.size == 1:
        return
    fingerprints = gather_facts(mine, int, doing="the comparison of the order of samples")
    if len(set(fingerprints)) > 1:
        shown = ", ".join(f"rank {rank}: {one:x}" for rank, one in enumerate(fingerprints))
        raise RankMismatchError(
            f"expected the sampler to give the same order on every rank, found {shown} (hash of "
            "the order); draw its random numbers from torch, random or numpy.random's global "
            "generators or from its own 'generator' attribute, which are seeded by the epoch, and "
            "do not let it depend on the rank: the loader divides the order over the ranks itself"
        )
