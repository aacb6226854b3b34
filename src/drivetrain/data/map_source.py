"""Reads a map-style dataset: the indices of every batch are known before a sample is touched."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from drivetrain import communication
from drivetrain.collectives.facts import gather_facts
from drivetrain.data.division import OrderDivision
from drivetrain.data.order import EpochOrder, fingerprint, forward_epoch
from drivetrain.data.rows import RowCount
from drivetrain.data.samples import collated, without_trace
from drivetrain.data.steps import GlobalStep, OrderIdentity, RankBatch, Start, reader_of
from drivetrain.errors import CheckpointError, RankMismatchError
from drivetrain.runtime import rng
from drivetrain.runtime.world import World


class _Plan:
    """The batches of indices that the loader underneath reads next; replaced every epoch."""

    def __init__(self) -> None:
        self.batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


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

    is_dispatched = False

    def __init__(
        self,
        loader: DataLoader[Any],
        order: EpochOrder,
        division: OrderDivision,
        *,
        ranks: Sequence[int],
        seedable: bool,
        world: World,
    ) -> None:
        self.division = division
        self._order = order
        self._ranks = ranks
        self._seedable = seedable
        self._world = world
        self._user = loader
        self._plan = _Plan()
        self._generator = torch.Generator()
        self._batched = loader.batch_sampler is not None
        self._takes_lists = self._batched or isinstance(loader.sampler, BatchSampler)
        self._reader = self._make_reader()

    def _make_reader(self, **changes: Any) -> DataLoader[Any]:
        plan = {"batch_sampler": self._plan} if self._batched else _unbatched(self._plan)
        return reader_of(self._user, self._user.dataset, self._generator, **plan, **changes)

    def __len__(self) -> int:
        return len(self._order)

    def batches(self, rank: int, seed: int, epoch: int) -> int:
        """Return the batches of a rank in a full epoch.

        Where the last batch may be too short for all ranks, the epoch's order tells.
        """
        division, total = self.division, len(self._order)
        most = division.steps(total, rank)
        if not (division.may_lack_shares and most):
            return most
        order = self._order.draw(seed + epoch, epoch)
        return most - (not division.has(order, total - division.stride, rank))

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of an epoch's order; collective when the user's generators decide."""
        if self._seedable or self._order.is_fixed:
            return seed + epoch
        return seed_of_main(self._order.draw_seed(self._user.generator), self._world)

    def steps(self, start: Start) -> Iterator[GlobalStep]:
        """Read the rest of an epoch, touching no sample before the position.

        Raises:
            CheckpointError: the position was saved in another order.
            RankMismatchError: ranks disagree on the order.
        """
        division = self.division
        if not start.aside:
            forward_epoch(self._user.dataset, start.epoch)
        order = self._order.draw(start.seed, start.epoch)
        identity = self._identify(order, start)
        stride, position = division.stride, start.position
        last = position + max(0, len(order) - position - 1) // stride * stride
        remainder = division.remainder(order, last) if position < len(order) else -1
        batches = self._read(order, division, start)
        counts = {rank: RowCount() for rank in self._ranks}

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
            shares = tuple(map(share, self._ranks))
            position = following
            yield GlobalStep(
                shares=shares,
                start=Start(
                    epoch=start.epoch, seed=start.seed, position=position, identity=identity
                ),
                remainder=remainder,
                final=not self._readers(order, division, position),
            )
        next(batches, None)  # lets the workers see the end of the epoch

    def _again(self, indices: list[Any], seed: int, samples: int) -> Any:
        """Return the first samples of a batch as a batch, leaving no trace."""
        with rng.fork(seed), without_trace(self._user.dataset, self._user.collate_fn):
            return collated(self._user, indices[:samples])

    def _readers(self, order: Sequence[Any], division: OrderDivision, position: int) -> list[int]:
        """Return the ranks that get a batch of the step at a position."""
        return [rank for rank in self._ranks if division.has(order, position, rank)]

    def _identify(self, order: Sequence[Any], start: Start) -> OrderIdentity:
        mark = None
        if not self._order.is_known:
            mark = fingerprint(order)
            if not start.aside:
                check_same_order(mark, self._world)
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
            hash((start.seed, start.position, self._ranks[0])) & ((1 << 63) - 1)
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


def _unbatched(plan: _Plan) -> dict[str, Any]:
    """Return the arguments of a loader that hands each item of the plan to the dataset whole."""
    return {"sampler": plan, "batch_size": None}


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
