"""Files written once, durably, and hashed on the way: safetensors files among them.

The safetensors library can write a file, but not hash it, nor refuse to follow a planted link, nor
work without numpy; the format is a length, a JSON header and the bytes, so files are written here,
and read with the library. Tensors go out through one small buffer: a tensor on an accelerator is
never copied to the CPU whole.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from drivetrain.errors import CheckpointError

BUFFER_BYTES = 16 * 2**20
"""Bytes of a tensor that are in flight between its device and the file."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The name of each dtype in the safetensors format."""


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
