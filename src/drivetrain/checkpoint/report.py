"""A rank's report to rank 0 about its part of a checkpoint: facts that cross ranks as JSON."""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.contents import Scalars
from drivetrain.checkpoint.manifest import SavedTensor
from drivetrain.checkpoint.plain import decode, encode
from drivetrain.checkpoint.tensorfile import DTYPES, FileRecord
from drivetrain.errors import CheckpointError

SCALARS = "scalars"
"""The name of scalars in the file of the state, and in messages."""

_TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A small tensor as text.

    Attributes:
        dtype: as safetensors calls it.
        shape: of the tensor.
        content: the elements in row-major order, as base64.
    """

    dtype: str
    shape: tuple[int, ...]
    content: str

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> "EncodedTensor":
        """Encode a tensor of any device.

        Args:
            key: the name of the tensor in the message of an error.
            tensor: to be copied.

        Raises:
            CheckpointError: a checkpoint cannot hold the dtype.
        """
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"expected {key} to have one of the dtypes {', '.join(sorted(DTYPES.values()))}, "
                f"found {tensor.dtype}; convert it before saving"
            )
        content = bytearray(tensor.nbytes)
        if content:
            elements = tensor.detach().contiguous().view(-1).view(torch.uint8)
            torch.frombuffer(content, dtype=torch.uint8).copy_(elements)
        return cls(DTYPES[tensor.dtype], tuple(tensor.shape), b64encode(content).decode())

    def decoded(self) -> Tensor:
        """Return the tensor, on the CPU."""
        content, dtype = bytearray(b64decode(self.content)), _TORCH_DTYPES[self.dtype]
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class EncodedScalars:
    """The scalars of a rank's models.

    Attributes:
        body: the scalars as JSON can hold them; see ``plain``.
        tensors: the tensors inside of the scalars, by key.
    """

    body: list[Any] = field(default_factory=list)
    tensors: dict[str, EncodedTensor] = field(default_factory=dict)

    @classmethod
    def of(cls, scalars: Sequence[Scalars]) -> "EncodedScalars":
        """Encode the scalars of each model.

        Raises:
            CheckpointError: a checkpoint cannot hold one of them.
        """
        tensors: dict[str, Tensor] = {}
        body = encode([dict(one) for one in scalars], SCALARS, tensors)
        return cls(body, {key: EncodedTensor.of(key, each) for key, each in tensors.items()})

    def decoded(self) -> list[Scalars]:
        """Return the scalars of each model."""
        tensors = {key: each.decoded() for key, each in self.tensors.items()}
        scalars: list[Scalars] = decode(self.body, tensors)
        return scalars


@dataclass(slots=True)
class Report:
    """A rank's report to rank 0.

    Attributes:
        files: the written files, by name.
        models: for each model the tensors in these files.
        rank_file: the name of the file with the rank's own state; "" without one.
        scalars: for each model the optimizer state that is no tensor.
        aliases: for each model the further names of tied parameters.
        finite: whether all parameters are finite numbers.
    """

    files: dict[str, FileRecord] = field(default_factory=dict)
    models: list[list[SavedTensor]] = field(default_factory=list)
    rank_file: str = ""
    scalars: EncodedScalars = field(default_factory=EncodedScalars)
    aliases: Sequence[Mapping[str, str]] = ()
    finite: bool = True
