"""Saves and loads one object for the user: tensors as safetensors, the rest as ``torch.save``.

Loading never runs code: a ``.safetensors`` file holds none, and other files are read with
``weights_only=True``.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.checkpoint.tensorfile import sync_directory, write_tensors
from drivetrain.errors import CheckpointError


def save(obj: Any, path: str | os.PathLike[str], *, safe_serialization: bool = False) -> None:
    """Write an object to a file, replacing the file only when the new one is whole.

    Args:
        obj: the object; with safe_serialization a dict of tensors by name.
        path: the file.
        safe_serialization: write a safetensors file; else ``torch.save`` writes it.

    Raises:
        CheckpointError: the object is no dict of tensors, or the disk refuses.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        if safe_serialization:
            write_tensors(draft, _tensors(obj))
        else:
            _write_object(draft, obj)
        draft.replace(target)
        sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot save {target}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Any:
    """Read an object from a file of ``save``, on the CPU.

    Args:
        path: the file; the suffix ``.safetensors`` tells its format.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it would need code to be run.
    """
    source = Path(path)
    if not source.is_file():
        raise CheckpointError(f"there is no file {source}; check the path")
    if source.suffix == ".safetensors":
        return read_tensors(source)
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen unrelated types here
        raise CheckpointError(
            f"cannot load {source}: it is damaged or holds more than tensors and plain values, "
            f"which is never loaded because that runs code ({type(error).__name__}: {error})"
        ) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _tensors(obj: Any) -> dict[str, Tensor]:
    if not isinstance(obj, Mapping):
        raise CheckpointError(
            f"expected a dict of tensors by name for safe_serialization, found "
            f"{type(obj).__qualname__}; pass safe_serialization=False"
        )
    wrong = [
        f"{key!r}: {type(value).__qualname__}"
        for key, value in obj.items()
        if not (isinstance(key, str) and isinstance(value, Tensor))
    ]
    if wrong:
        raise CheckpointError(
            f"expected only tensors, by names that are str, for safe_serialization, found "
            f"{', '.join(wrong[:4])}; leave these out or pass safe_serialization=False"
        )
    return dict(obj)


def _write_object(path: Path, obj: Any) -> None:
    with path.open("xb") as file:
        torch.save(obj, file)
        file.flush()
        os.fsync(file.fileno())
