"""A checkpoint seen from outside of a run: its manifest and its state, no tensor. No torch."""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.checkpoint.manifest import CODES, Manifest, SavedTensor
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# --- the file of the state ---

STATE_FILE = "state.json"

UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""The errors of ``read_state``, and of whoever takes a damaged state for a state."""


def read_state(directory: Path) -> dict[str, Any]:
    """Return the state of a checkpoint as JSON has it, which nobody has verified."""
    state: dict[str, Any] = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))[
        "state"
    ]
    return state


def decode(value: Any, tensors: "Mapping[str, Tensor]") -> Any:
    """Return the value that ``encode`` was given, from parsed JSON and the stored tensors by key.

    Raises:
        CheckpointError: a tag that this version does not know, or a tensor that is not there.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    try:
        return _untag(tag, value[tag], tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"expected a known tag with its value, found {{{tag!r}: ...}} ({error!r}); the state "
            "is damaged or was written by a newer version"
        ) from error


def _untag(tag: str, value: Any, tensors: "Mapping[str, Tensor]") -> Any:
    if tag == "$tensor":
        return tensors[value]
    if tag == "$float":
        return float(value)
    if tag == "$tuple":
        return tuple(decode(item, tensors) for item in value)
    if tag in ("$dict", "$counter"):
        pairs = {key: decode(item, tensors) for key, item in value}
        return Counter(pairs) if tag == "$counter" else pairs
    raise KeyError(tag)


# --- what a checkpoint holds ---


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
    manifest, steps = Manifest.read(directory), None
    with suppress(*UNREADABLE, CheckpointError):  # verify says what is wrong with the file
        steps = tuple(map(int, decode(read_state(directory)["steps"], {})))
    return Description(directory, manifest, steps)


def tensor_bytes(tensor: SavedTensor) -> int:
    """Return the bytes of a whole tensor in the dtype it is saved in."""
    return prod(tensor.shape) * CODES[tensor.dtype][1]


def _row(tensor: SavedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "state": tensor.state,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor_bytes(tensor),
        "parts": len(tensor.parts),
    }
