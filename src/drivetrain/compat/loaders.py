"""Accelerate's functions and classes of loaders, for scripts without an Accelerator at hand."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from drivetrain import data
from drivetrain.config import DataConfig
from drivetrain.data import PreparedLoader
from drivetrain.errors import UsageError
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World


def prepare_data_loader(  # noqa: PLR0913, PLR0917 - the arguments of Accelerate
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """Divide a loader over processes, by Accelerate's arguments.

    Args:
        dataloader: the user's loader.
        device: of the batches, with ``put_on_device``; None means this process's.
        num_processes: how many parts there are; None means all processes.
        process_index: which part; None means this process's.
        split_batches: divide the loader's batch over the processes instead of giving one to each.
        put_on_device: move batches to the device.
        rng_types: generators that process 0 gives to all when an epoch starts.
        dispatch_batches: process 0 alone reads and sends.
        even_batches: repeat the first samples so that every process has as many full batches.
        slice_fn_for_dispatch: not supported; batches are cut along dim 0.
        use_seedable_sampler: derive the shuffle order from seed and epoch.
        data_seed: seed of the shuffle order.
        non_blocking: copy batches to the device asynchronously.
        use_stateful_dataloader: without effect: every loader knows its position.
        torch_device_mesh: not supported; ``accelerator.prepare`` knows the mesh.

    Raises:
        UsageError: an argument without support, parts that are not the processes for a loader that
            one process reads for all, or a loader that cannot be divided.
    """
    del use_stateful_dataloader
    if slice_fn_for_dispatch is not None or torch_device_mesh is not None:
        raise UsageError(
            "expected no slice_fn_for_dispatch and no torch_device_mesh; batches are cut along dim "
            "0, and accelerator.prepare(loader) divides over the mesh of the strategy"
        )
    world = World.discover()
    size = world.size if num_processes is None else num_processes
    rank = world.rank if process_index is None else process_index
    alike = (size, rank) == (world.size, world.rank)
    if dispatch_batches and not alike:
        raise UsageError(
            f"expected num_processes={world.size} and process_index={world.rank} with "
            f"dispatch_batches, found {size} and {rank}; leave them out"
        )
    ranks = tuple(range(size))
    return data.prepare_data_loader(
        dataloader,
        axis=Axis(name="dp", size=size, rank=rank, ranks=ranks, hosts=("localhost",) * size),
        world=world if alike else World(),
        config=DataConfig(
            split_batches=split_batches,
            dispatch_batches=dispatch_batches if alike else False,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking,
        ),
        seed=None,
        device=(device or world.device) if put_on_device else None,
        rng_types=[str(getattr(each, "value", each)) for each in rng_types or ()],
    )


class LoaderClass(type):
    """Class of ``DataLoaderShard`` and ``DataLoaderDispatcher``, whose instances prepare() makes.

    Attributes:
        dispatched: whether process 0 reads for all.
    """

    dispatched: bool

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, PreparedLoader) and instance.is_dispatched is cls.dispatched

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        """Refuse to be called.

        Raises:
            UsageError: says how such loaders are made.
        """
        raise UsageError(
            f"expected a torch DataLoader, found a call of {cls.__name__}; pass the DataLoader to "
            "accelerator.prepare, with DataLoaderConfiguration(dispatch_batches="
            f"{cls.dispatched})"
        )


class DataLoaderShard(metaclass=LoaderClass):
    """For scripts that ask ``isinstance(loader, DataLoaderShard)``."""

    dispatched = False


class DataLoaderDispatcher(metaclass=LoaderClass):
    """For scripts that ask ``isinstance(loader, DataLoaderDispatcher)``."""

    dispatched = True
