"""Reads an exported model back: one safetensors file, or the files that an index names."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.checkpoint.export import INDEX, SINGLE
from drivetrain.checkpoint.manifest import basename
from drivetrain.errors import CheckpointError


def read_export(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of an export, on the CPU, one tensor in memory at a time.

    Args:
        path: the directory, its index, or a single safetensors file.

    Raises:
        CheckpointError: nothing to read is there, a file is missing or damaged, or the index names
            a file outside the directory.
    """
    for file, names in export_files(path).items():
        yield from _read(file, names)


def export_files(path: Path) -> dict[Path, list[str] | None]:
    """Return the files to read with the names each must give, None for all it has.

    Raises:
        CheckpointError: nothing to read is there, a file is missing, or the index names a file
            outside the directory.
    """
    if path.is_dir():
        found = [path / name for name in (SINGLE, INDEX) if (path / name).is_file()]
        if not found:
            raise CheckpointError(f"expected {SINGLE} or {INDEX} in {path}, found neither")
        path = found[0]
    if not path.is_file():
        raise CheckpointError(f"there is no exported model {path}; check the path")
    return _indexed(path) if path.suffix == ".json" else {path: None}


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    names: dict[Path, list[str]] = {}
    for name, file in _weight_map(index).items():
        names.setdefault(index.parent / basename(file), []).append(name)
    absent = [file.name for file in names if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {len(absent)} are missing: "
            f"{', '.join(sorted(absent)[:4])}; export the model again"
        )
    return dict(names)


def _weight_map(index: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of an export: {error!r}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"expected weight_map in {index} to be a mapping, found {found!r}")
    return found


def _read(path: Path, names: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys() if names is None else names:
                yield name, file.get_tensor(name).clone()
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not whole: {error}; export the model again") from error
