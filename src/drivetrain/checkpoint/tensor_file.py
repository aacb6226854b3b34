"""Safetensors files, written once and hashed on the way, and copies between parts of tensors.

The safetensors library can write a file, but not hash it, nor refuse to follow a planted link, nor
work without numpy; the format is a length, a JSON header and the bytes, so files are written here,
and read with the library. Tensors go out through one small buffer: a tensor on an accelerator is
never copied to the CPU whole.

Every part is a few boxes, so every copy between two parts is a few copies between overlapping
boxes, done by strided views.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.manifest import CODES, FileRecord, HashedFile, overlap
from drivetrain.errors import CheckpointError
from drivetrain.runtime.parts import Box, Part, boxes

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
    if overlap(wanted.offsets, wanted.sizes, saved.offsets, saved.sizes) is None:
        return 0
    copied = 0
    pieces = list(boxes(saved))
    for goal in boxes(wanted):
        for piece in pieces:
            common = overlap(goal.offsets, goal.sizes, piece.offsets, piece.sizes)
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
