"""The plain loader underneath: the user's settings over the library's indices."""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from drivetrain.errors import UsageError


def reader_of(
    loader: DataLoader[Any], dataset: Any, generator: torch.Generator, **changes: Any
) -> DataLoader[Any]:
    """Return a plain loader with the settings of the user's, except for the changes.

    Args:
        loader: the user's loader.
        dataset: its dataset, or a shard of it.
        generator: seeds the workers, so that an epoch draws nothing from torch's global state.
        changes: arguments of DataLoader.
    """
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "persistent_workers": loader.persistent_workers,
        "generator": generator,
    }
    if loader.num_workers:
        settings["multiprocessing_context"] = loader.multiprocessing_context
        settings["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(dataset, **{**settings, **changes})


def check_readable(loader: DataLoader[Any], size: int) -> None:
    """Refuse loaders that cannot be taken apart into indices and a dataset.

    Args:
        loader: the user's loader.
        size: number of ranks that it will be divided over.

    Raises:
        UsageError: the class iterates in a way of its own, batches come out of order, or a sampler
            divides the data over the ranks already.
    """
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
