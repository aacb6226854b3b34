"""Turns the user's loader into this rank's part of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from drivetrain.config import DataConfig
from drivetrain.data.division import (
    BatchDivision,
    EpochOrder,
    OrderDivision,
    SampleDivision,
    generators,
)
from drivetrain.data.loader import Delivery, PreparedLoader, Progress
from drivetrain.data.sources import BatchSource, MapSource, seed_of_main
from drivetrain.data.streams import DispatchSource, IterableSource, StreamSource
from drivetrain.errors import UsageError
from drivetrain.runtime.gradient_state import ActivePass, GradientState
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World

LARGEST_SEED = 2**63 - 1
"""Seeds travel as signed integers of 64 bits."""


def prepare_data_loader(  # noqa: PLR0913  one call site, keyword-only
    loader: DataLoader[Any],
    *,
    axis: Axis,
    world: World,
    config: DataConfig,
    seed: int | None,
    device: torch.device | None,
    observer: GradientState | None = None,
    rng_types: Sequence[str] = (),
    fetching: Callable[[DataLoader[Any]], None] | None = None,
    exhausted: Callable[[], None] | None = None,
    delivered: Callable[[Any], Any] | None = None,
    between: Callable[[ActivePass], None] | None = None,
) -> PreparedLoader:
    """Divide a loader over the data-parallel axis.

    Args:
        loader: the user's loader; a prepared loader is returned as it is.
        axis: the data-parallel axis; ranks with the same index on it get the same batches.
        world: all ranks; they must iterate together.
        config: how to divide.
        seed: of the shuffle order, unless the configuration has a data_seed; None takes the seed of
            rank 0's generator: the loader's own, or torch's. Collective then.
        device: where batches go; None leaves them where they are.
        observer: is told of batches, and when passes end.
        rng_types: generators that rank 0 gives to all ranks when an epoch starts.
        fetching: is told the loader before each batch is read.
        exhausted: is told when there was none.
        delivered: turns each batch, on its device, into the one that the script gets.
        between: called when the script asks for another batch, before that is read.

    Raises:
        UsageError: the loader cannot be divided; the message says how to change it.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    _check_readable(loader, axis.size)
    delivery = Delivery(
        rank=axis.rank,
        device=device,
        non_blocking=config.non_blocking,
        observer=observer,
        alone=observer is None or world.size == 1,
        rng_types=tuple(rng_types),
        fetching=fetching,
        exhausted=exhausted,
        delivered=delivered,
        between=between,
    )
    chosen = seed if config.data_seed is None else config.data_seed
    progress = Progress(seed=_drawn_seed(loader, world) if chosen is None else chosen)
    return PreparedLoader(loader, _source(loader, axis, world, config, device), progress, delivery)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> PreparedLoader:
    """Return a loader whose next epoch starts some batches from its beginning.

    The count is absolute, also after a position was restored. Later epochs are whole. With a
    prepared loader, both share epoch and position. No sample before the position is read, except
    from an iterable dataset, which is read past it.

    Args:
        dataloader: any loader; an unprepared loader is read by this process alone.
        num_batches: this rank's batches to leave out.

    Raises:
        UsageError: the number is negative, or the loader cannot be taken apart.
    """
    if num_batches < 0:
        raise UsageError(f"expected num_batches >= 0, found {num_batches}")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    alone = Axis(name="dp", size=1, rank=0, ranks=(0,), hosts=("localhost",))
    config = DataConfig(use_seedable_sampler=False)
    prepared = prepare_data_loader(
        dataloader, axis=alone, world=World(), config=config, seed=0, device=None
    )
    return prepared.skipping(num_batches)


def _drawn_seed(loader: DataLoader[Any], world: World) -> int:
    """Return the seed of the generator that would shuffle the loader without this library.

    It is read, not drawn from: a script's own random numbers stay as they are.
    """
    dataset = loader.dataset if isinstance(loader.dataset, IterableDataset) else None
    own = generators(loader.batch_sampler, loader.sampler, loader, dataset)
    generator = next(own, torch.default_generator)
    return seed_of_main(generator.initial_seed() & LARGEST_SEED, world)


def _check_readable(loader: DataLoader[Any], size: int) -> None:
    """Refuse loaders that cannot be taken apart into indices and a dataset, over ``size`` ranks."""
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"expected a loader that iterates as torch's DataLoader, found {kind.__name__} with "
            "its own __iter__, which would not run; pass a DataLoader (its position is saved and "
            "restored without help), or leave this loader unprepared"
        )
    if loader.num_workers and not loader.in_order:
        raise UsageError(
            "expected a loader with in_order=True, found in_order=False: a position in the epoch "
            "means nothing when batches overtake each other; remove the argument"
        )
    if size > 1 and isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "expected a sampler over the whole dataset, found a DistributedSampler: the loader "
            "would be divided over the ranks twice; use shuffle=True or an ordinary sampler"
        )


def _source(
    loader: DataLoader[Any],
    axis: Axis,
    world: World,
    config: DataConfig,
    device: torch.device | None,
) -> BatchSource:
    dispatched = bool(config.dispatch_batches) and world.size > 1
    ranks = tuple(range(axis.size)) if dispatched else (axis.rank,)
    on_device = device is not None
    source: BatchSource
    if isinstance(loader.dataset, IterableDataset):
        cut = _sample_division(loader, axis, config)
        if max(axis.size, world.size) > 1 and not dispatched:
            return StreamSource(loader, cut, axis, world, config, on_device=on_device)
        source = IterableSource(loader, cut, ranks=ranks)
    else:
        order, division = _order(loader, axis, config)
        source = MapSource(
            loader,
            order,
            division,
            ranks=ranks,
            seedable=config.use_seedable_sampler,
            world=World() if dispatched else world,  # rank 0 reads alone, with nobody to agree with
        )
    if dispatched:
        return DispatchSource(source, world, axis.rank, on_device=on_device)
    return source


def _order(
    loader: DataLoader[Any], axis: Axis, config: DataConfig
) -> tuple[EpochOrder, OrderDivision]:
    """Return the order to divide: samples under torch's batch sampler, or the user's batches."""
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if type(sampler) is BatchSampler:
        division = _samples(sampler.batch_size, sampler.drop_last, axis, config)
        return EpochOrder(sampler.sampler), division
    if loader.batch_sampler is not None or isinstance(sampler, BatchSampler):
        return EpochOrder(sampler), _batches(sampler, axis, config)
    return EpochOrder(sampler), _sample_division(loader, axis, config)


def _sample_division(loader: DataLoader[Any], axis: Axis, config: DataConfig) -> SampleDivision:
    """Divide by the loader's own batch size; without one, each item is a batch."""
    if loader.batch_size is None and config.split_batches and axis.size > 1:
        raise UsageError(
            "expected a loader with a batch_size to divide its batches with split_batches, found "
            "batch_size=None; set split_batches=False"
        )
    return _samples(loader.batch_size or 1, loader.drop_last, axis, config)


def _samples(batch_size: int, drop_last: bool, axis: Axis, config: DataConfig) -> SampleDivision:
    if config.split_batches:
        _check_divides(batch_size, axis.size)
        batch_size //= axis.size
    return SampleDivision(
        size=axis.size,
        batch_size=batch_size,
        even=config.even_batches and axis.size > 1,
        drop_last=drop_last,
    )


def _batches(sampler: Any, axis: Axis, config: DataConfig) -> BatchDivision:
    batch_size: Any = getattr(sampler, "batch_size", None)
    split = config.split_batches and axis.size > 1
    even = config.even_batches and axis.size > 1
    if split and batch_size is None:
        raise UsageError(
            f"expected the batch sampler {type(sampler).__name__} to have a batch_size, found "
            "none; give it that attribute, or set split_batches=False for batches of varying size"
        )
    if split:
        _check_divides(batch_size, axis.size)
    return BatchDivision(
        size=axis.size,
        batch_size=batch_size,
        split=split,
        even=even,
        drop_last=bool(getattr(sampler, "drop_last", False)),
    )


def _check_divides(batch_size: int, size: int) -> None:
    if batch_size % size:
        raise UsageError(
            f"expected a batch size that divides over {size} ranks with split_batches, found "
            f"{batch_size}; use a multiple of {size} or set split_batches=False"
        )
