"""Looks at a checkpoint from outside of a run: lists the contents, and verifies the files.

Nothing here needs the model, a process group, or more memory than one tensor's header.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from drivetrain.checkpoint.assembly import first_overlap, numel
from drivetrain.checkpoint.common_files import STATE_FILE
from drivetrain.checkpoint.manifest import Manifest, SavedTensor
from drivetrain.checkpoint.plain import decode
from drivetrain.checkpoint.tensorfile import DTYPES, FileRecord
from drivetrain.errors import CheckpointError
from drivetrain.shards import label

_BYTES = {code: dtype.itemsize for dtype, code in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of a checkpoint.

    Attributes:
        directory: its place.
        manifest: as read from its file.
        steps: the count of each optimizer; None when the state has no counts.
    """

    directory: Path
    manifest: Manifest
    steps: tuple[int, ...] | None

    @property
    def file_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size for record in self.manifest.files.values())

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain data for JSON."""
        manifest = self.manifest
        return {
            "directory": str(self.directory),
            "version": manifest.version,
            "world_size": manifest.world_size,
            "libraries": dict(manifest.libraries),
            "steps": None if self.steps is None else list(self.steps),
            "bytes": self.file_bytes,
            "files": {name: record.size for name, record in manifest.files.items()},
            "models": [
                {"tensors": [_row(tensor) for tensor in tensors], "aliases": dict(aliases)}
                for tensors, aliases in zip(manifest.models, manifest.aliases, strict=True)
            ],
        }


def describe(directory: Path) -> Description:
    """Return the contents of a checkpoint, from its manifest and its state alone."""
    manifest = Manifest.read(directory)
    return Description(directory, manifest, _steps(directory / STATE_FILE))


def find_problems(directory: Path) -> list[str]:
    """Return all faults of a checkpoint: an empty list when the checkpoint can be loaded.

    Checked are the manifest, the size and SHA-256 of every file, that every part is in its file
    with its dtype and length, and that the parts of a tensor hold each element exactly once.
    """
    try:
        manifest = Manifest.read(directory)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    problems = {
        name: _file_problem(directory / name, record) for name, record in manifest.files.items()
    }
    found = [problem for problem in problems.values() if problem]
    headers = _Headers(directory)
    for tensors in manifest.models:
        for tensor in tensors:
            whole = not any(problems[part.file] for part in tensor.parts)
            found += [*_overlaps(tensor), *(headers.problems(tensor) if whole else ())]
    return found


def tensor_bytes(tensor: SavedTensor) -> int:
    """Return the bytes of a whole tensor in the dtype it is saved in."""
    return prod(tensor.shape) * _BYTES[tensor.dtype]


class _Headers:
    """The headers of a checkpoint's safetensors files, each read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, dict[str, tuple[str, int]] | str] = {}

    def problems(self, tensor: SavedTensor) -> Iterator[str]:
        """Yield which parts are not in their files as the manifest says."""
        for saved in tensor.parts:
            header = self._read(saved.file)
            if isinstance(header, str):
                yield header
                continue
            expected = (tensor.dtype, numel(saved.part))
            if header.get(saved.key) != expected:
                yield (
                    f"{self._directory / saved.file}: expected {expected[1]} elements of "
                    f"{expected[0]} as {saved.key!r}, found {header.get(saved.key, 'nothing')}"
                )

    def _read(self, name: str) -> dict[str, tuple[str, int]] | str:
        if name not in self._known:
            try:
                with safe_open(self._directory / name, framework="pt") as file:
                    slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                    self._known[name] = {
                        key: (each.get_dtype(), prod(each.get_shape()))
                        for key, each in slices.items()
                    }
            except (SafetensorError, OSError) as error:
                self._known[name] = f"{self._directory / name} is no safetensors file: {error}"
        return self._known[name]


def _file_problem(path: Path, record: FileRecord) -> str:
    """Return the fault of a file, "" for an intact file."""
    if not path.is_file():
        return f"{path}: expected {record.size} bytes, found no such file"
    size = path.stat().st_size
    if size != record.size:
        return f"{path}: expected {record.size} bytes, found {size}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != record.sha256:
        return f"{path}: expected sha256 {record.sha256}, found {digest}"
    return ""


def _overlaps(tensor: SavedTensor) -> Iterator[str]:
    """Yield that two parts overlap: the manifest has seen that the sizes add up."""
    pair = first_overlap([saved.part for saved in tensor.parts])
    if pair is not None:
        yield (
            f"{label(tensor.name, tensor.state)}: expected each element in one part, found some "
            f"in both {pair[0]} and {pair[1]}"
        )


def _steps(path: Path) -> tuple[int, ...] | None:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))["state"]
        return tuple(int(count) for count in decode(state["steps"], {}))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, CheckpointError):
        return None  # verify says what is wrong with the file


def _row(tensor: SavedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "state": tensor.state,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor_bytes(tensor),
        "parts": len(tensor.parts),
    }
