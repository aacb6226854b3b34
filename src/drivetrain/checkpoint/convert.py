"""Makes an export of a checkpoint in one process, of any strategy and number of ranks.

Each tensor is assembled from its parts in the dtype it is written in, written, and dropped before
the next one is read.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from drivetrain.checkpoint.export import ExportPlan, plan_export, write_export
from drivetrain.checkpoint.loading import ModelReader, open_checkpoint
from drivetrain.errors import CheckpointError
from drivetrain.runtime.world import World
from drivetrain.shards import TensorFacts


def export_checkpoint(
    directory: Path,
    output: Path,
    *,
    model: int = 0,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "10GB",
    verify: str = "full",
) -> ExportPlan:
    """Write one model of a checkpoint as Hugging Face style safetensors.

    Args:
        directory: the checkpoint.
        output: gets the files; those of an earlier export in it are replaced.
        model: index of the prepared model, in the order of ``prepare()``.
        dtype: of floating-point weights in the export; None keeps each as it was saved.
        max_shard_size: bytes per file, as a number or a text such as ``"5GB"``.
        verify: ``full`` checks the checksum of every file first, ``size`` its size only.

    Returns:
        Which tensor went to which file.

    Raises:
        CheckpointError: not a checkpoint, damaged, without this model, values too large for the
            dtype, or the output cannot be written; an earlier export is untouched then.
    """
    world = World()
    with open_checkpoint(directory, world, verify=verify) as reader:
        source = reader.model(model)
        names = [name for name, state in source.keys() if not state]  # noqa: SIM118
        dtypes = {name: _exported(source.dtype(name), dtype) for name in names}
        described = [
            TensorFacts(name, source.shape(name), dtypes[name], source.aliases.get(name, name))
            for name in names
        ]
        plan = plan_export(described, max_shard_size)

        def fetch(wanted: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            for name in wanted:
                yield name, _read(source, name, dtypes[name])

        write_export(output, plan, fetch, world=world)
    return plan


def _exported(saved: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and saved.is_floating_point else saved


def _read(source: ModelReader, name: str, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the wanted dtype; refuse one whose finite values become infinite."""
    tensor = source.read(name, dtype=dtype)
    narrowed = dtype.is_floating_point and torch.finfo(dtype).max < _largest(source, name)
    if narrowed and tensor.numel() and _has_infinity(tensor):
        del tensor  # never two at a time
        _check_infinite(source, name, dtype)
        return source.read(name, dtype=dtype)
    return tensor


def _check_infinite(source: ModelReader, name: str, dtype: torch.dtype) -> None:
    """Raise when the saved values are finite, so that only the dtype made them infinite."""
    low, high = torch.aminmax(source.read(name))
    if not (low.isinf() or high.isinf()):
        raise CheckpointError(
            f"expected the values of {name!r} to fit {dtype}, which ends at "
            f"{torch.finfo(dtype).max:g}, found values from {float(low):g} to {float(high):g}; "
            "export as bf16 or fp32"
        )


def _largest(source: ModelReader, name: str) -> float:
    return torch.finfo(source.dtype(name)).max


def _has_infinity(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)
    return bool(low.isinf() or high.isinf())
