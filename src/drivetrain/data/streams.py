"""Iterable datasets: a stream is cut into global batches, read by each rank or by rank 0 for all.

Streams are cut before collation and in the reading process. So with workers, too, only the last
global batch of an epoch can be short, and no sample is repeated before it.
"""

import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import communication
from drivetrain.collectives.facts import differing, gather_facts, meet_everyone
from drivetrain.config import DataConfig
from drivetrain.data.division import (
    OrderDivision,
    SampleDivision,
    filled,
    forward_epoch,
    hashed,
)
from drivetrain.data.sources import (
    BatchSource,
    GlobalStep,
    OrderIdentity,
    RankBatch,
    RowCount,
    Start,
    count_rows,
    reader_of,
    without_trace,
)
from drivetrain.errors import CheckpointError, CollectiveError, UsageError
from drivetrain.log import get_logger
from drivetrain.nested import recursively_apply
from drivetrain.runtime import rng
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World


def _as_read(samples: Any) -> Any:
    """Collate nothing: samples travel from the workers as the dataset made them."""
    return samples


class IterableSource:
    """Reads the batches of some ranks from a stream.

    A dataset with ``state_dict`` and ``load_state_dict`` that is read without workers returns to a
    position by itself. Any other dataset is read past the consumed samples, so its stream must
    repeat its order: a ``generator`` attribute is seeded by the epoch.

    Args:
        loader: the user's loader.
        division: how a global batch is divided.
        ranks: as the attribute.
        part: the dataset of this rank alone, which is not divided again; None divides the loader's
            own. Parts may differ in length. Without ``even`` ranks may then have different numbers
            of batches; with it ranks exchange lengths in each step. A position is valid for the
            same number of ranks only.
        begun: as the attribute.

    Attributes:
        division: how a global batch is divided.
        ranks: which ranks to read for.
        begun: the samples of the next pass, of which some are read already.
        is_dispatched: False: every rank reads for itself.
    """

    is_dispatched = False

    division: OrderDivision

    def __init__(
        self,
        loader: DataLoader[Any],
        division: OrderDivision,
        *,
        ranks: Sequence[int],
        part: Any = None,
        begun: Iterator[Any] | None = None,
    ) -> None:
        self.division = division
        self._user = loader
        self._shards = 1 if part is None else division.size
        self.ranks = ranks if part is None else (0,)
        self._dataset: Any = loader.dataset if part is None else part
        self._generator = torch.Generator()
        # Without workers one sample at a time, so that the dataset is never ahead of its state.
        self._chunk = loader.batch_size if loader.num_workers else None
        self._reader = self._make_reader(self._dataset)
        has_state = all(
            callable(getattr(self._dataset, name, None))
            for name in ("state_dict", "load_state_dict")
        )
        self._keeps_state = has_state and not loader.num_workers and part is None
        self.begun = begun

    def _make_reader(self, dataset: Any, **changes: Any) -> DataLoader[Any]:
        return reader_of(
            self._user,
            dataset,
            self._generator,
            batch_size=self._chunk,
            collate_fn=_as_read,
            pin_memory=False,
            **changes,
        )

    def batches(self, rank: int, seed: int, epoch: int) -> int:
        """Return the batches of a rank in a full epoch; TypeError without a length."""
        total = len(self._user.dataset)  # type: ignore[arg-type]
        if self._shards > 1 and self._dataset is self._user.dataset:  # its length is of the part
            return self._cut().steps(total, 0)
        return self.division.steps(total, rank)

    def first(self, start: Start, count: int) -> list[Any]:
        """Return the first samples of the epoch, with which the next pass then begins.

        There are fewer where the stream ends, or fails: the failure is the next pass's.
        """
        before = self._dataset.state_dict() if self._keeps_state else None
        if self.begun is None:
            self._prepare(start, self._dataset)
        stream = self._samples(self._reader) if self.begun is None else self.begun
        found: list[Any] = []
        try:
            found += islice(stream, count)
        except Exception as error:
            stream = _failing(error)
        if self._keeps_state:
            self._dataset.load_state_dict(before)
        else:
            self.begun = chain(found, stream)
        return found

    def again(self, seed: int, count: int) -> list[Any]:
        """Return the first samples once more, while every generator is seeded."""
        self._generator.manual_seed(seed)
        with rng.fork(seed), without_trace(self._dataset):
            return list(islice(self._samples(self._reader), count))

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of the workers; the order is the dataset's own affair."""
        return seed + epoch

    def steps(self, start: Start) -> Iterator[GlobalStep]:
        """Read the rest of an epoch, one global batch ahead.

        Raises:
            CheckpointError: the position was saved with another number of shards.
        """
        identity = OrderIdentity(shards=self._shards)
        if start.identity is not None and start.identity.shards != self._shards:
            raise CheckpointError(
                f"expected to read {start.identity.shards} shards, as when the position was saved, "
                f"found {self._shards}; resume with as many ranks and the same even_batches, or "
                f"start the epoch again with set_epoch({start.epoch + 1})"
            )
        division = self._cut()
        dataset = _beside(self._dataset) if start.aside else self._dataset
        head, stream = self._open(start, division.stride, dataset)
        samples, state = self._take(stream, division, dataset)
        sizes = self._sizes(samples, division)
        position = start.position
        counts = {rank: RowCount() for rank in self.ranks}
        while any(sizes):
            if len(head) < division.stride:
                head = [*head, *samples][: division.stride]
            if not position and len(sizes) > 1 and not all(sizes):
                raise UsageError(
                    "expected a part of the stream on every rank to fill its batches from, found "
                    f"{sizes} samples in the first batches of the ranks; divide it into more "
                    "parts, or set even_batches=False"
                )
            following, following_state = self._take(stream, division, dataset)
            following_sizes = self._sizes(following, division)
            rest = following or [None] * any(following_sizes)  # other ranks go on with their parts
            # Ranks that have no samples left count those of others.
            counted = division.stride if self._shards > 1 and division.even else len(samples)
            position += counted * self._shards
            yield GlobalStep(
                shares=tuple(
                    self._share(division, rank, (samples, rest, head), counts[rank])
                    for rank in self.ranks
                ),
                start=replace(start, position=position, identity=identity, dataset_state=state),
                remainder=-1 if any(following_sizes) else self._remainder(samples, sizes, division),
                final=not any(following_sizes),
            )
            samples, state, sizes = following, following_state, following_sizes

    def _sizes(self, samples: Sequence[Any], division: SampleDivision) -> list[int]:
        """Return how many samples the step has, of each rank where ranks read parts."""
        if self._shards == 1 or not division.even:
            return [len(samples)]
        sizes: list[int] = communication.gather(torch.tensor([len(samples)], device="cpu")).tolist()
        short = division.drop_last and min(sizes) < division.stride
        return [0] if short else sizes

    def _cut(self) -> SampleDivision:
        """Return how the stream that is read here is divided: a part is not."""
        division = cast(SampleDivision, self.division)  # a stream has no batch sampler
        return division if self._shards == 1 else replace(division, size=1)

    def _open(self, start: Start, stride: int, dataset: Any) -> tuple[list[Any], Iterator[Any]]:
        """Return the samples that fill up the last batch, and the stream at the position."""
        begun, self.begun = self.begun, None
        reader = self._reader
        if start.aside:
            reader = self._make_reader(dataset, persistent_workers=False)
        if begun is None:
            self._prepare(start, dataset)
        if self._keeps_state and start.dataset_state is not None:
            dataset.load_state_dict(start.dataset_state)
            return [], self._samples(reader)
        stream = self._samples(reader) if begun is None else begun
        consumed = start.position // self._shards
        head = list(islice(stream, min(consumed, stride)))
        for _ in islice(stream, consumed - len(head)):
            pass
        return head, stream

    def _prepare(self, start: Start, dataset: Any) -> None:
        """Tell a dataset its epoch, and seed its generator and the workers."""
        if not start.aside:
            forward_epoch(dataset, start.epoch)
        own = getattr(dataset, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(start.seed)  # ranks that read the same stream must see one order
        self._generator.manual_seed(start.seed)

    def _samples(self, reader: DataLoader[Any]) -> Iterator[Any]:
        for item in reader:
            if self._chunk is not None:
                yield from item
            else:
                yield item

    def _take(
        self, stream: Iterator[Any], division: SampleDivision, dataset: Any
    ) -> tuple[list[Any], Any]:
        """Read a global batch, and the dataset's state right after it."""
        samples = list(islice(stream, division.stride))
        if division.drop_last and len(samples) < division.stride:
            samples = []
        state = dataset.state_dict() if self._keeps_state and samples else None
        return samples, state

    def _share(
        self,
        division: SampleDivision,
        rank: int,
        read: tuple[list[Any], list[Any], list[Any]],
        count: RowCount,
    ) -> RankBatch | None:
        """Return a rank's batch.

        Args:
            division: of what is read here.
            rank: index in the division.
            read: the samples of this step and of the rest, and what fills up the last step.
            count: of the rank's rows.
        """
        samples, rest, head = read
        whole = filled(samples, head, division.stride) if division.even else samples
        mine = division.share(whole, 0, rank) if division.has(whole, 0, rank) else []
        if not division.fills:
            mine = mine[: max(1, division.real(samples, 0, rank))]
        if not mine:
            return None
        batch = self._collate(mine)

        def again(real: int) -> Any:
            with rng.fork(0), without_trace(self._user.collate_fn):
                return self._collate(mine[:real])

        rows = None
        if division.even:
            rows = count.of(batch, len(mine), division.real(samples, 0, rank), again)
        if self._user.pin_memory and torch.accelerator.is_available():
            batch = recursively_apply(torch.Tensor.pin_memory, batch)
        return RankBatch(batch, not division.has(rest, 0, rank), rows)

    def _collate(self, samples: list[Any]) -> Any:
        return self._user.collate_fn(samples if self._user.batch_size is not None else samples[0])

    def _remainder(self, samples: list[Any], sizes: Sequence[int], division: SampleDivision) -> int:
        full = division.stride * len(sizes)
        if not division.even or sum(sizes) == full:
            return -1
        if self._user.batch_size is not None or self._shards > 1:
            return sum(sizes)
        return sum(count_rows(self._user.collate_fn(sample)) for sample in samples)


def _failing(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _beside(dataset: Any) -> Any:
    """Return a dataset for a pass beside another one, which must notice nothing."""
    other = copy.copy(dataset)
    if isinstance(own := getattr(dataset, "generator", None), torch.Generator):
        other.generator = own.clone_state()
    return other


# --- rank 0 reads for all: each global step is one header and one block of bytes ---


@dataclass(frozen=True, slots=True)
class _PackedTensor:
    """Stands in a batch for a tensor: where its bytes are in the block."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class _Block:
    """The bytes of many tensors, one after the other."""

    def __init__(self) -> None:
        self._parts = [torch.empty(0, dtype=torch.uint8, device="cpu")]
        self._size = 0

    def put(self, tensor: Tensor) -> _PackedTensor:
        """Append a tensor; returns its place in the block."""
        slot = _PackedTensor(self._size, tuple(tensor.shape), tensor.dtype)
        self._parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        self._size += slot.nbytes
        return slot

    def payload(self) -> Tensor:
        """Return all bytes, (size,) uint8."""
        return torch.cat(self._parts)


@dataclass(frozen=True, slots=True)
class _Header:
    """The message before the block: a step without its tensors, or the end, or a failure."""

    step: GlobalStep | None
    nbytes: int = 0
    failure: str = ""


class SourceAround:
    """A source that reads through another one.

    Args:
        source: the other one.
    """

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    @property
    def is_dispatched(self) -> bool:
        """Whether rank 0 alone reads, and sends to the others."""
        return self._source.is_dispatched

    @property
    def division(self) -> OrderDivision:
        """How the order is divided."""
        return self._source.division

    @division.setter
    def division(self, division: OrderDivision) -> None:
        self._source.division = division

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of an epoch's order."""
        return self._source.draw_seed(seed, epoch)

    def batches(self, rank: int, seed: int, epoch: int) -> int:
        """Return the batches of a rank in a full epoch."""
        return self._source.batches(rank, seed, epoch)


class DispatchSource(SourceAround):
    """Gives every rank its share of the data that rank 0 reads; the others touch no data.

    Args:
        source: reads the shares of all ranks; iterated on rank 0 only.
        world: the ranks, all of which must iterate together.
        share: index of this rank's share; ranks of one model-parallel cell have the same.
        on_device: leave received batches on the device of the group, instead of the CPU.

    Attributes:
        is_dispatched: True.
    """

    is_dispatched = True

    def __init__(self, source: BatchSource, world: World, share: int, *, on_device: bool) -> None:
        super().__init__(source)
        self._world = world
        self._share = share
        self._on_device = on_device

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of an epoch's order; only rank 0's counts."""
        return super().draw_seed(seed, epoch) if self._world.is_main else seed + epoch

    def steps(self, start: Start) -> Iterator[GlobalStep]:
        """Read and send on rank 0, receive elsewhere; one rank's share per step.

        Raises:
            CollectiveError: on the other ranks, when reading failed on rank 0; on all, when ranks
                do not read together.
        """
        steps = self._send(start) if self._world.is_main else self._receive(start)
        for step in steps:
            yield replace(step, shares=(step.shares[self._share],))

    def _send(self, start: Start) -> Iterator[GlobalStep]:
        steps = self._source.steps(start)
        final, here = False, start
        while not final:
            failed: Exception | None = None
            try:
                step = next(steps, None)
                header, payload = _packed(step)
            except Exception as error:  # reading or collating failed: the others wait for a header
                failed, header = error, _failure(error)
            self._meet(start, here)
            try:
                self._broadcast_header(header)
            except Exception as error:  # pickling failed
                failed = error
                self._broadcast_header(_failure(error))
            if failed is not None:
                raise failed
            if len(payload):
                dist.broadcast(payload.to(self._device), src=0)
            final = step is None or step.final
            if step is not None:
                here = step.start
                yield step
        next(steps, None)  # lets the source see its end

    def _receive(self, start: Start) -> Iterator[GlobalStep]:
        final, here = False, start
        while not final:
            self._meet(start, here)
            header = self._broadcast_header(None)
            if header.failure:
                raise CollectiveError(
                    f"expected a batch from rank 0, found that reading failed there: "
                    f"{header.failure}; see the traceback of rank 0"
                )
            if header.step is None:
                return
            payload = torch.empty(header.nbytes, dtype=torch.uint8, device=self._device)
            if header.nbytes:
                dist.broadcast(payload, src=0)
            final, here = header.step.final, header.step.start
            yield self._unpacked(header.step, payload if self._on_device else payload.cpu())

    def _meet(self, start: Start, here: Start) -> None:
        """Let no rank take a batch of another pass, which one rank alone has begun."""
        beside = ", beside another pass" if start.aside else ""
        meet_everyone(f"reading of batch {here.position} of epoch {here.epoch}{beside} by rank 0")

    def _unpacked(self, step: GlobalStep, payload: Tensor) -> GlobalStep:
        shares = list(step.shares)
        mine = shares[self._share]
        if mine is not None:
            shares[self._share] = mine._replace(batch=_unpack(mine.batch, payload))
        return replace(step, shares=tuple(shares))

    def _broadcast_header(self, header: _Header | None) -> _Header:
        held: list[Any] = [header]
        dist.broadcast_object_list(held, src=0)
        received: _Header = held[0]
        return received

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if "gloo" in self._world.backend else self._world.device


def _failure(error: Exception) -> _Header:
    return _Header(None, failure=f"{type(error).__name__}: {error}")


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor whose bytes can travel; others travel in the header."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


def _packed(step: GlobalStep | None) -> tuple[_Header, Tensor]:
    """Return the header and the block of bytes of a step."""
    block = _Block()
    if step is None:
        return _Header(None), block.payload()
    shares = tuple(
        share
        and share._replace(batch=recursively_apply(block.put, share.batch, test_type=_is_plain))
        for share in step.shares
    )
    start = replace(step.start, dataset_state=None)  # rank 0 keeps it
    payload = block.payload()
    return _Header(replace(step, shares=shares, start=start), nbytes=len(payload)), payload


def _unpack(batch: Any, payload: Tensor) -> Any:
    """Return the batch with tensors for slots."""

    def take(slot: _PackedTensor) -> Tensor:
        # Cloned: a view would keep everybody's bytes alive and may start at an odd address.
        part = payload[slot.offset : slot.offset + slot.nbytes].clone()
        return part.view(slot.dtype).reshape(slot.shape)

    return recursively_apply(take, batch, test_type=lambda value: isinstance(value, _PackedTensor))


# --- stream that ranks read as its first samples ask for: one stream for all, or parts ---

# When the first pass begins, ranks compare their first samples. Alike, they are one stream, which
# is divided. A dataset that divides itself over the ranks gives each rank samples of its own: these
# are not divided again. Ranks may also read the same samples in random orders of their own.


logger = get_logger(__name__)

SAMPLES, MORE = 32, 256
"""So many first samples of each rank are compared; where they differ, so many in all."""

SEED = 20150501
"""Of the generators, where a stream is read once more: any would do."""


class _Kind(Enum):
    """What ranks read: the same samples, in one order or in several, or parts of them."""

    SAME, SHUFFLED, PARTS, UNKNOWN = range(4)


class StreamSource(SourceAround):
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
        super().__init__(self._own)
        if self._dispatches:
            self._source = DispatchSource(self._own, world, axis.rank, on_device=on_device)

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
        elif not division.even and self._axis.size > 1:
            dataset: Any = self._user.dataset
            size, index = self._axis.size, self._axis.rank
            count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", 0))
            if callable(getattr(dataset, "shard", None)) and count >= size:
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
    return hashed(_parts(sample))


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
