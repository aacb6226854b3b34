"""What a rank saves, and how tensors and plain values become files and come back.

Plain means None, bool, int, float, str, list, tuple, dict with str or int keys, Counter, and
tensors inside these. JSON lacks tuples, int keys, nan and infinities: they become objects with a
single key that starts with ``$``. Tensors go to a safetensors file and leave their key behind.
Nothing else is accepted: reading a checkpoint must never run code. A single object of the user is
read with ``weights_only=True`` for the same reason.

The safetensors library can write a file, but not hash it, nor refuse to follow a planted link, nor
work without numpy; the format is a length, a JSON header and the bytes, so files are written here,
and read with the library. Tensors go out through one small buffer: a tensor on an accelerator is
never copied to the CPU whole.

Every part is a few boxes, so every copy between two parts is a few copies between overlapping
boxes, done by strided views.
"""

import json
import math
import os
import secrets
import struct
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from torch import Tensor

from drivetrain.checkpoint.manifest import (
    CODES,
    FILE_NAME,
    STATE_FILE,
    FileRecord,
    HashedFile,
    Manifest,
    SavedTensor,
    decode,
    fits,
    libraries,
    merge_tensors,
    numel,
    overlap,
    sync_directory,
    write_bytes,
)
from drivetrain.errors import CheckpointError
from drivetrain.runtime.parts import Box, Part, boxes, label
from drivetrain.shards import Shard

BUFFER_BYTES = 16 * 2**20
"""Bytes of a tensor that are in flight between its device and the file."""

DTYPES: Mapping[torch.dtype, str] = {
    getattr(torch, name): code for code, (name, _) in CODES.items()
}
"""The name of each dtype in the safetensors format."""


class TensorFile(HashedFile):
    """A new safetensors file whose tensors are announced first, then added in turn.

    Args:
        path: the file; it must not exist.
        tensors: dtype and shape of each tensor, in the order in which ``add`` gets them. Wider
            dtypes must come first so that every tensor is aligned.
        metadata: strings kept in the header.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header = _header(tensors, metadata)
        super().__init__(path)
        self._expected = [(key, dtype, tuple(shape)) for key, (dtype, shape) in tensors.items()]
        self._next = 0
        self._buffer = bytearray()
        self.write(header)

    def add(self, key: str, tensor: Tensor) -> None:
        """Write the next announced tensor, from any device and of any strides.

        Raises:
            CheckpointError: another tensor was announced, or this one holds no data.
        """
        found = (key, tensor.dtype, tuple(tensor.shape))
        expected = self._expected[self._next] if self._next < len(self._expected) else None
        if found != expected:
            raise CheckpointError(
                f"expected {expected} next in {self.path}, found {found}; tensors must be written "
                "in the order and with the dtype and shape that were announced"
            )
        if tensor.is_meta or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"expected the tensor {key!r} to hold strided data, found device {tensor.device}, "
                f"layout {tensor.layout}; materialise it before saving"
            )
        self._next += 1
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for chunk in torch.split(content, BUFFER_BYTES):
            if len(self._buffer) < len(chunk):
                self._buffer = bytearray(len(chunk))
            if len(chunk):
                torch.frombuffer(self._buffer, dtype=torch.uint8)[: len(chunk)].copy_(chunk)
                self.write(memoryview(self._buffer)[: len(chunk)])

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is None and self._next < len(self._expected):
            missing = [key for key, _, _ in self._expected[self._next :]]
            raise CheckpointError(f"{self.path} lacks announced tensors: {missing[:4]}")


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize == 1:
        return True
    # A finite sum is read off faster; a sum of finite numbers may be too large.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a new safetensors file durably and return its size and digest.

    Raises:
        CheckpointError: a dtype that the format lacks, or a tensor without data.
        OSError: the file exists, or the disk refuses.
    """
    keys = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)  # else as given
    plan = {key: (tensors[key].dtype, tensors[key].shape) for key in keys}
    with TensorFile(path, plan) as file:
        for key in keys:
            file.add(key, tensors[key])
    return file.record


def _header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None
) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, (dtype, shape) in tensors.items():
        if key == "__metadata__":
            raise CheckpointError(
                f"a tensor cannot be called {key!r} in a safetensors file; rename it"
            )
        if dtype not in DTYPES:
            raise CheckpointError(
                f"the tensor {key!r} has dtype {dtype}, which safetensors files cannot hold; "
                f"convert it to one of {', '.join(sorted(DTYPES.values()))}"
            )
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[key] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# --- copies between parts ---


def copy_overlap(target: Tensor, wanted: Part, source: Tensor, saved: Part) -> int:
    """Copy the elements that two parts of one global tensor share.

    Args:
        target: 1-D, contiguous, the memory of the wanted part; written.
        wanted: the part of ``target``.
        source: 1-D, contiguous, the memory of the saved part; only the shared elements are read.
        saved: the part of ``source``.

    Returns:
        How many elements were copied.
    """
    if overlap((wanted.offsets, wanted.sizes), (saved.offsets, saved.sizes)) is None:
        return 0
    copied = 0
    pieces = list(boxes(saved))
    for goal in boxes(wanted):
        for piece in pieces:
            common = overlap(goal[:2], piece[:2])
            if common is not None:
                _window(target, goal, *common).copy_(_window(source, piece, *common))
                copied += prod(common[1])
    return copied


def _window(memory: Tensor, box: Box, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Return the view of a box's memory that is the given smaller box, in global coordinates."""
    view = memory[box.start : box.start + prod(box.sizes)].view(box.sizes)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        view = view.narrow(dim, offset - box.offsets[dim], size)
    return view


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Return the value as JSON can hold it.

    Args:
        value: a plain value.
        where: its path, for messages and as the key of tensors.
        tensors: gets the tensors found inside, to be stored beside the JSON.

    Raises:
        CheckpointError: the value is not plain; the message names the path to the culprit.
    """
    try:
        return _encode(value, where, tensors)
    except RecursionError:
        raise CheckpointError(
            f"{where} contains itself or is nested too deeply; a checkpoint holds plain values only"
        ) from None


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        key = where
        while key in tensors:  # two paths can read alike when keys contain dots
            key += "'"
        tensors[key] = value
        return {"$tensor": key}
    if type(value) in (list, tuple, torch.Size):
        items = [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (Counter, dict, OrderedDict, defaultdict):
        tag = "$counter" if type(value) is Counter else "$dict"
        if tag == "$counter" or any(type(key) is not str or key.startswith("$") for key in value):
            return {tag: _pairs(value, where, tensors)}
        return {key: _encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold; state must be tensors and plain values: None, bool, int, float, str, and "
        "lists, tuples and dicts of these (code is never stored). Let state_dict() return such"
    )


def _pairs(value: Mapping[Any, Any], where: str, tensors: dict[str, Tensor]) -> list[list[Any]]:
    for key in value:
        if type(key) not in (str, int):
            raise CheckpointError(
                f"{where} has the key {key!r} of type {type(key).__qualname__}; "
                "the keys of a dict in a checkpoint must be str or int"
            )
    return [[key, _encode(item, f"{where}[{key!r}]", tensors)] for key, item in value.items()]


# --- what one rank saves, and staged copies ---


T = TypeVar("T")

Scalars = Mapping[int, Mapping[str, Mapping[str, Any]]]
"""State of one model that is no tensor: optimizer -> parameter name -> state key -> plain value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The tensors and the state that a rank saves.

    Attributes:
        models: for each prepared model the shards of this rank; over all ranks each element once.
        scalars: for each model the optimizer state of this rank that is no tensor; the shares of
            the ranks are joined, and must be equal where ranks overlap.
        aliases: for each model the further names of tied parameters -> the name of their shards.
        state: plain values that are the same on all ranks (rank 0's are stored): schedulers,
            epoch, loader positions, custom objects.
        rank_state: tensors of this rank alone, such as its random-number states.
        encoded: files with bytes that only the user can read, by file name (rank 0's are stored).
        parameters: for each model the names whose values must be finite for the checkpoint to count
            as finite; buffers may hold infinity on purpose.
    """

    models: Sequence[Iterable[Shard]]
    scalars: Sequence[Scalars] = ()
    aliases: Sequence[Mapping[str, str]] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Tensor] = field(default_factory=dict)
    encoded: Mapping[str, bytes] = field(default_factory=dict)
    parameters: Sequence[Collection[str]] = ()

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shards; only for contents that hold lists of them, as ``staged`` returns."""
        return sum(shard.tensor.nbytes for shards in self.models for shard in shards)

    def copied_kinds(self) -> list[tuple[torch.dtype, torch.Size]]:
        """Return dtype and shape of each copy that ``staged`` makes, in its order.

        All shards are walked, which may communicate, and uses up the contents.
        """
        return [
            (shard.tensor.dtype, shard.tensor.shape)
            for shards in self.models
            for shard in shards
            if not shard.fresh
        ]

    def staged(
        self, write: Callable[[int, Shard], None], copy: Callable[[Tensor], Tensor]
    ) -> "Contents":
        """Return a copy in host memory, of this rank's shards and nothing more.

        The copy takes as many bytes as the shards that lie in memory. All shards are walked
        whatever happens: yielding one may communicate. Fresh shards, which are copies already, go
        to ``write`` with the index of their model: there may be no room for a second copy, so the
        returned contents lack them. The others are copied by ``copy``.

        Raises:
            CheckpointError: a state is not plain.
            RuntimeError: there is no memory for the copy.
        """
        models: list[list[Shard]] = []
        failures: list[Exception] = []
        for index, shards in enumerate(self.models):
            copies: list[Shard] = []
            for shard in shards:
                try:
                    if shard.fresh:
                        write(index, shard)
                    elif not failures:
                        copies.append(replace(shard, tensor=copy(shard.tensor)))
                except (RuntimeError, MemoryError) as error:
                    failures.append(error)
                    models.clear()
                    copies.clear()
            models.append(copies)
        if failures:
            raise failures[0]
        return Contents(
            models=models,
            scalars=_snapshot(list(self.scalars), "scalars"),
            aliases=[dict(names) for names in self.aliases],
            state=_snapshot(dict(self.state), "state"),
            rank_state={key: _copy(tensor) for key, tensor in self.rank_state.items()},
            encoded=dict(self.encoded),
            parameters=self.parameters,
        )


def _snapshot(value: T, where: str) -> T:
    """Return a value as a load would give it back: a copy without shared memory."""
    tensors: dict[str, Tensor] = {}
    body = encode(value, where, tensors)
    copied: T = decode(body, {key: _copy(tensor) for key, tensor in tensors.items()})
    return copied


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def check_shard(shard: Shard) -> None:
    """Refuse a shard whose tensor is not the part that the shard names."""
    fine = fits(shard.part, shard.shape) and numel(shard.part) == shard.tensor.numel()
    if not fine:
        raise CheckpointError(
            f"the strategy's shard of {label(shard.name, shard.state)} has {shard.tensor.numel()} "
            f"of {math.prod(shard.shape)} elements, which does not match its {shard.part}"
        )


def merge_scalars(ranks: Sequence[Sequence[Scalars]]) -> list[dict[Any, Any]]:
    """Join the scalars of all ranks, model by model; ranks with the same key need equal values."""
    merged: list[dict[Any, Any]] = [{} for _ in ranks[0]]
    for rank, models in enumerate(ranks):
        for index, model in enumerate(models):
            _join(merged[index], model, rank, f"scalars[{index}]")
    return merged


def _join(into: dict[Any, Any], more: Mapping[Any, Any], rank: int, where: str) -> None:
    for key, value in more.items():
        path = f"{where}[{key!r}]"
        known = into.get(key)
        if key not in into:
            into[key] = value
        elif isinstance(known, dict) and isinstance(value, Mapping):
            _join(known, value, rank, path)
        elif not _alike(known, value):
            raise CheckpointError(
                f"ranks disagree on {path}: rank {rank} has {value!r}, a lower rank {known!r}; "
                "optimizer state that is not sharded must be the same on all ranks"
            )


def _alike(one: Any, other: Any) -> bool:
    """Whether a checkpoint holds equal values for two: 0 equals -0, and NaN equals NaN."""
    mine: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    if encode(one, SCALARS, mine) != encode(other, SCALARS, theirs):
        return False
    return all(
        (each.dtype, each.shape) == (twin.dtype, twin.shape)
        and bool(torch.isclose(each, twin, rtol=0, atol=0, equal_nan=True).all())
        for each, twin in zip(mine.values(), theirs.values(), strict=True)
    )


# --- a report from each rank to rank 0, and the files in common ---


STATE_TENSORS = "state.safetensors"

SCALARS = "scalars"
"""The name of scalars in the file of the state, and in messages."""


def pack(tensors: Mapping[str, Tensor]) -> str:
    """Return small tensors of any device as a safetensors file, in base64: for JSON.

    Raises:
        CheckpointError: a checkpoint cannot hold the dtype.
    """
    content = _header({key: (each.dtype, each.shape) for key, each in tensors.items()}, None)
    for tensor in tensors.values():
        elements = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        content += elements.numpy().tobytes()
    return b64encode(content).decode()


@dataclass(slots=True)
class Report:
    """A rank's report to rank 0.

    Attributes:
        files: the written files, by name.
        models: for each model the tensors in these files.
        rank_file: the name of the file with the rank's own state; "" without one.
        scalars: for each model the optimizer state that is no tensor, as ``encode`` returns it.
        tensors: the tensors inside of the scalars, packed.
        aliases: for each model the further names of tied parameters.
        finite: whether all parameters are finite numbers.
    """

    files: dict[str, FileRecord] = field(default_factory=dict)
    models: list[list[SavedTensor]] = field(default_factory=list)
    rank_file: str = ""
    scalars: list[Any] = field(default_factory=list)
    tensors: str = field(default_factory=lambda: pack({}))
    aliases: Sequence[Mapping[str, str]] = ()
    finite: bool = True

    def keep_scalars(self, scalars: Sequence[Scalars]) -> None:
        """Take the scalars of each model into the report.

        Raises:
            CheckpointError: a checkpoint cannot hold one of them.
        """
        tensors: dict[str, Tensor] = {}
        self.scalars = encode([dict(one) for one in scalars], SCALARS, tensors)
        self.tensors = pack(tensors)


def write_common(draft: Path, reports: list[Report], contents: Contents) -> dict[str, FileRecord]:
    """Write the files of all ranks in common, the manifest last, and return them; on rank 0."""
    files = {name: record for report in reports for name, record in report.files.items()}
    models = tuple(
        merge_tensors(tensor for piece in pieces for tensor in piece)
        for pieces in zip(*(report.models for report in reports), strict=True)
    )
    scalars = merge_scalars(
        [decode(each.scalars, load_bytes(b64decode(each.tensors))) for each in reports]
    )
    aliases: tuple[dict[str, str], ...] = tuple({} for _ in models)
    for report in reports:  # a rank with only part of a model knows few tied names
        for names, more in zip(aliases, report.aliases, strict=False):
            names.update(more)
    tensors: dict[str, Tensor] = {}
    body = {
        "state": encode(dict(contents.state), "state", tensors),
        SCALARS: encode(list(scalars), SCALARS, tensors),
    }
    text = json.dumps(body, indent=1) + "\n"
    common = {STATE_FILE: write_bytes(draft / STATE_FILE, text.encode())}
    if tensors:
        common[STATE_TENSORS] = write_tensors(draft / STATE_TENSORS, tensors)
    for name, data in contents.encoded.items():
        common[name] = write_bytes(draft / name, data)
    manifest = Manifest(
        world_size=len(reports),
        libraries=libraries(),
        files=files | common,
        models=models,
        aliases=aliases,
        finite=all(report.finite for report in reports),
        rank_files={
            rank: report.rank_file for rank, report in enumerate(reports) if report.rank_file
        },
    )
    common[FILE_NAME] = write_bytes(draft / FILE_NAME, manifest.to_text().encode())
    return common


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
            with draft.open("xb") as file:
                torch.save(obj, file)
                file.flush()
                os.fsync(file.fileno())
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
        try:
            with safe_open(source, framework="pt") as file:
                return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{source} is not a whole safetensors file: {error}") from error
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen unrelated types here
        raise CheckpointError(
            f"cannot load {source}: it is damaged or holds more than tensors and plain values, "
            f"which is never loaded because that runs code ({type(error).__name__}: {error})"
        ) from error


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
