"""The manifest of a checkpoint, and the files it names: written once, hashed on the way. No torch.

It is written last, so a directory with a manifest is a complete checkpoint. It carries the size
and SHA-256 of every other file and of itself. Reading it believes nothing: every name must be a
plain file name, every part must lie inside its tensor, and all parts must add up to the tensor.
"""

import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from drivetrain.errors import CheckpointError, in_words
from drivetrain.runtime.parts import Part, boxes, label

if TYPE_CHECKING:
    from torch import Tensor

# --- files written once, durably, and hashed on the way ---

CODES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "C64": ("complex64", 8),
}  # fmt: skip
"""The dtypes of safetensors files: what torch calls them, and the bytes of an element."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The properties that a trusted file must have.

    Attributes:
        size: bytes.
        sha256: digest of its content, in hex.
    """

    size: int
    sha256: str


def file_record(path: Path) -> FileRecord:
    """Return the properties of a file as it is."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


class HashedFile:
    """A new file that is on disk when the ``with`` block ends; its digest comes for free.

    Raises:
        OSError: the file exists, or the disk refuses; ``filename`` is always set.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._size = 0
        # O_EXCL: never write through a file or link that somebody planted at this name.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    @property
    def record(self) -> FileRecord:
        """Size and digest of the bytes written so far."""
        return FileRecord(self._size, self._digest.hexdigest())

    def write(self, data: bytes | memoryview) -> None:
        """Append all of the data; a short write goes on with the rest."""
        self._digest.update(data)
        self._size += len(data)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None:
                os.fsync(self._fd)
        except OSError as failure:
            raise OSError(failure.errno, failure.strerror, str(self.path)) from failure
        finally:
            os.close(self._fd)


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a new file durably and return its size and digest."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error
    finally:
        os.close(descriptor)


# --- the manifest of a checkpoint ---

Extent: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box."""


def numel(part: Part) -> int:
    """Return how many elements a part has."""
    first, last = part.range
    return last - first


def fits(part: Part, shape: Sequence[int]) -> bool:
    """Return whether a part lies inside a tensor of this shape."""
    if not len(part.offsets) == len(part.sizes) == len(shape):
        return False
    inside = all(
        min(offset, size) >= 0 and offset + size <= extent
        for offset, size, extent in zip(part.offsets, part.sizes, shape, strict=True)
    )
    return inside and (part.flat is None or 0 <= part.flat[0] <= part.flat[1] <= prod(part.sizes))


def first_overlap(parts: Sequence[Part]) -> tuple[Part, Part] | None:
    """Return two parts of one tensor that share elements, None when no two do.

    Parts of the same box are compared by their ranges; only boxes that overlap are compared
    element range by element range. So it stays quick for a part on each of many ranks.
    """
    by_box: dict[Extent, list[Part]] = {}
    for part in parts:
        if numel(part):
            by_box.setdefault((part.offsets, part.sizes), []).append(part)
    for same in by_box.values():
        same.sort(key=lambda part: part.range)
        for one, other in pairwise(same):
            if other.range[0] < one.range[1]:
                return one, other
    for box, another in _overlapping(sorted(by_box)):
        for one, other in product(by_box[box], by_box[another]):
            for first, second in product(boxes(one), boxes(other)):
                if overlap(first[:2], second[:2]) is not None:
                    return one, other
    return None


def _overlapping(ordered: Sequence[Extent]) -> Iterator[tuple[Extent, Extent]]:
    """Yield the pairs of boxes that overlap, of boxes sorted by their offsets."""
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other[0][0] >= one[0][0] + one[1][0]:
                break
            if overlap(one, other) is not None:
                yield one, other


def overlap(one: Extent, other: Extent) -> Extent | None:
    """Return the box that two boxes share, None when they share nothing."""
    low = tuple(map(max, one[0], other[0]))
    high = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    extent = tuple(end - begin for begin, end in zip(low, high, strict=True))
    return (low, extent) if all(size > 0 for size in extent) else None


# --- the manifest ---


FILE_NAME = "manifest.json"
FORMAT = "drivetrain-checkpoint"
VERSION = 1

T = TypeVar("T")
_BASENAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One part of a tensor: the tensor ``key`` of the file ``file``, and the fields of ``Part``."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: tuple[int, int] | None

    @property
    def part(self) -> Part:
        """The place of the part in the whole tensor."""
        return Part(self.offsets, self.sizes, self.flat)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A parameter, buffer or optimizer state with all its parts.

    Attributes:
        name: the parameter's or buffer's name in the user's model.
        state: "" for the parameter or buffer, else ``INDEX.KEY`` of the optimizer's state.
        dtype: as safetensors calls it, for example ``BF16``.
        shape: the global shape.
        parts: the pieces; together each element exactly once.
    """

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[SavedPart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of a checkpoint directory.

    Attributes:
        world_size: number of ranks at the time of saving.
        libraries: versions of the libraries that saved, for bug reports.
        files: size and digest of every file but the manifest.
        models: the tensors of each prepared model.
        rank_files: by rank, the file with the rank's own state.
        aliases: of each model, the further names of tied parameters -> the name in ``models``;
            empty in manifests that were written before there were aliases.
        finite: whether all parameters are finite numbers; true in manifests that do not say.
        version: of the format.
    """

    world_size: int
    libraries: Mapping[str, str]
    files: Mapping[str, FileRecord]
    models: tuple[tuple[SavedTensor, ...], ...]
    rank_files: Mapping[int, str]
    aliases: tuple[Mapping[str, str], ...]
    finite: bool = True
    version: int = VERSION

    @property
    def digest(self) -> str:
        """The digest of all files but the manifest."""
        return _digest({name: record.sha256 for name, record in self.files.items()})

    def to_text(self) -> str:
        """Return the JSON text, with a digest of its own content."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "world_size": self.world_size,
            "libraries": dict(self.libraries),
            "finite": self.finite,
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
            "models": [
                {"tensors": list(map(asdict, model)), "aliases": dict(aliases)}
                for model, aliases in zip(self.models, self.aliases, strict=True)
            ],
            "rank_files": {str(rank): name for rank, name in sorted(self.rank_files.items())},
        }
        return json.dumps({**body, "sha256": _digest(body)}, separators=(",", ":")) + "\n"

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and validate the manifest of a checkpoint directory.

        Raises:
            CheckpointError: there is none, it is damaged, of another format or too new, or it
                names files outside the directory.
        """
        path = directory / FILE_NAME
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if not directory.exists():
                raise CheckpointError(absent(directory)) from None
            none = "none; it is not a checkpoint of this library, or not a whole one"
            below = f"checkpoints below it: {names}" if (names := _named_below(directory)) else none
            raise CheckpointError(f"expected {FILE_NAME} in {directory}, found {below}") from None
        except NotADirectoryError:
            raise CheckpointError(
                f"expected the folder of a checkpoint, found the file {directory}; name the folder "
                f"that holds {FILE_NAME}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: {in_words(error)}; take another checkpoint"
            ) from error
        _check_format(path, body)
        try:
            return cls._parse(body)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{path} is not a valid manifest: {in_words(error)}; take another checkpoint"
            ) from error

    @classmethod
    def _parse(cls, body: Mapping[str, Any]) -> "Manifest":
        files = {
            basename(name): FileRecord(int(record["size"]), str(record["sha256"]))
            for name, record in body["files"].items()
        }

        def listed(name: str) -> str:
            if basename(name) not in files:
                raise CheckpointError(
                    f"the manifest uses the file {name!r} without listing its digest"
                )
            return name

        return cls(
            world_size=int(body["world_size"]),
            libraries=dict(body["libraries"]),
            finite=bool(body.get("finite", True)),
            files=files,
            models=tuple(
                tuple(_tensor_from_json(tensor, listed) for tensor in model["tensors"])
                for model in body["models"]
            ),
            rank_files={int(rank): listed(name) for rank, name in body["rank_files"].items()},
            aliases=tuple(
                {str(alias): str(name) for alias, name in model.get("aliases", {}).items()}
                for model in body["models"]
            ),
        )


def basename(name: str) -> str:
    """Return a file name from an untrusted source, if the name is plain.

    Raises:
        CheckpointError: it has a folder in it, or is otherwise not a plain file name.
    """
    if not isinstance(name, str) or not _BASENAME.fullmatch(name):
        raise CheckpointError(
            f"expected a plain file name inside the directory, found {name!r}; "
            "the file that names it is damaged or was made to reach outside"
        )
    return name


def merge_tensors(pieces: Iterable[SavedTensor]) -> tuple[SavedTensor, ...]:
    """Join the ranks' parts of each tensor.

    Raises:
        CheckpointError: ranks disagree on a dtype or shape, or the parts of a tensor do not add up
            to the tensor.
    """
    merged: dict[tuple[str, str], SavedTensor] = {}
    parts: dict[tuple[str, str], list[SavedPart]] = {}
    for piece in pieces:
        key = (piece.name, piece.state)
        first = merged.setdefault(key, piece)
        if (first.dtype, first.shape) != (piece.dtype, piece.shape):
            raise CheckpointError(
                f"ranks disagree on {label(*key)}: {first.dtype} {first.shape} and "
                f"{piece.dtype} {piece.shape}; a strategy must save a tensor in one dtype and shape"
            )
        parts.setdefault(key, []).extend(piece.parts)
    tensors = tuple(replace(first, parts=tuple(parts[key])) for key, first in merged.items())
    for tensor in tensors:
        _check_parts(tensor)
    return tensors


def libraries() -> dict[str, str]:
    """Return the versions that a manifest records."""
    names = ("drivetrain", "torch", "safetensors")
    return {name: version(name) for name in names} | {"python": platform.python_version()}


def absent(directory: Path) -> str:
    """Say that there is no such checkpoint, and which there are beside it."""
    names = _named_below(directory.parent)
    way_out = f"those beside it: {names}" if names else "check the path"
    return f"there is no checkpoint {directory}; {way_out}"


def _named_below(directory: Path) -> str:
    """Return the checkpoints that a folder holds, with the request to name one; "" for none."""
    paths = [*directory.glob(f"*/{FILE_NAME}"), *directory.glob(f"*/*/{FILE_NAME}")]
    names = sorted((str(path.parent) for path in paths), key=lambda name: (len(name), name))
    return f"{', '.join(names)}; name one of them" if names else ""


def _check_format(path: Path, body: Any) -> None:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise CheckpointError(f"expected the format {FORMAT!r} in {path}, found {found!r}")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"expected format version {VERSION} in {path}, found {body.get('version')!r}, written "
            f"by {body.get('libraries')}; install the version of drivetrain that wrote it or newer"
        )
    found = body.pop("sha256", None)
    if found != _digest(body):
        raise CheckpointError(
            f"expected sha256 {found} of the content of {path}, found {_digest(body)}; the file "
            "was changed after it was written: take another checkpoint"
        )


def _check_parts(tensor: SavedTensor) -> None:
    for saved in tensor.parts:
        if not fits(saved.part, tensor.shape):
            raise CheckpointError(
                f"{label(tensor.name, tensor.state)} of shape {tensor.shape} has a part outside "
                f"of it: {saved.part}"
            )
    held = sum(numel(saved.part) for saved in tensor.parts)
    if held != prod(tensor.shape):
        raise CheckpointError(
            f"expected the parts of {label(tensor.name, tensor.state)} to hold each of its "
            f"{prod(tensor.shape)} elements exactly once, found {held}; this is a fault of the "
            "strategy that saved it"
        )


def _tensor_from_json(body: Mapping[str, Any], listed: Callable[[str], str]) -> SavedTensor:
    tensor = SavedTensor(
        name=str(body["name"]),
        state=str(body["state"]),
        dtype=str(body["dtype"]),
        shape=_integers(body["shape"]),
        parts=tuple(
            SavedPart(
                listed(saved["file"]),
                str(saved["key"]),
                _integers(saved["offsets"]),
                _integers(saved["sizes"]),
                None if saved["flat"] is None else _range(saved["flat"]),
            )
            for saved in body["parts"]
        ),
    )
    if tensor.dtype not in CODES:
        raise CheckpointError(
            f"{label(tensor.name, tensor.state)} has the unknown dtype {tensor.dtype!r}"
        )
    _check_parts(tensor)
    return tensor


def _integers(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _range(values: Iterable[Any]) -> tuple[int, int]:
    first, last = _integers(values)
    return first, last


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


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
