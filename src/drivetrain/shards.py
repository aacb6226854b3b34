"""Pieces of training state in coordinates of whole tensors: strategies save and load them."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from drivetrain.runtime.parts import Part


@dataclass(frozen=True, slots=True)
class Shard:
    """One piece of the training state, in global coordinates.

    Attributes:
        name: the parameter's or buffer's name in the user's model.
        state: "" for the parameter or buffer itself, else ``INDEX.KEY``: the optimizer's index in
            ``prepare`` and its state key, for example ``0.exp_avg``; or ``links.`` and what a sum
            over a slow link keeps (``drivetrain.compression.error_feedback``).
        tensor: the data of the part; its shape is ``part.sizes``, or 1-D for a flat range.
        shape: the global shape.
        part: which part of the global tensor ``tensor`` is.
        fresh: whether the tensor is a copy that was made for whoever walks the shards, who decides
            how many of them are in memory at once.
    """

    name: str
    state: str
    tensor: Tensor
    shape: tuple[int, ...]
    part: Part
    fresh: bool = False

    @classmethod
    def whole(cls, name: str, state: str, tensor: Tensor, *, fresh: bool = False) -> "Shard":
        """Return all of a tensor as one piece."""
        shape = tuple(tensor.shape)
        return cls(name, state, tensor.detach(), shape, Part.whole(shape), fresh)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One parameter or persistent buffer of the user's whole model.

    Attributes:
        name: in the user's model.
        shape: the global shape.
        dtype: as the model holds it.
        identity: equal for tied tensors.
        trainable: whether the tensor is a parameter that requires gradients.
        where: the unit or stage that has it, in a few words for messages; "" where every rank does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: Hashable
    trainable: bool = False
    where: str = ""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorFacts":
        """Describe a tensor that this rank has whole; tied names share the very same object."""
        return cls(name, tuple(tensor.shape), tensor.dtype, id(tensor), tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def outer_dim(tensor: Tensor) -> int:
    """Return the dim whose slices lie one after the other in memory; of size 1 none counts."""
    if tensor.is_contiguous():  # as nearly all are, and many times as quick as to compare strides
        return next((dim for dim, size in enumerate(tensor.shape) if size > 1), 0)
    strides = {dim: tensor.stride(dim) for dim, size in enumerate(tensor.shape) if size > 1}
    if not strides or not is_dense(tensor):
        return 0
    return max(strides, key=lambda dim: strides[dim])


class HeldPart(NamedTuple):
    """The part of a parameter that a rank's modules have.

    Attributes:
        shape: of the part.
        word: tells the part from others in keys of state; equal on all ranks that have the same
            part, and "" for the whole parameter.
    """

    shape: tuple[int, ...]
    word: str = ""


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's state dict: the objects, perhaps without memory."""
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def parameters_among(tensors: Iterable[Tensor]) -> list[nn.Parameter]:
    """Return the distinct parameters."""
    return list({id(p): p for p in tensors if isinstance(p, nn.Parameter)}.values())


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlap, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Reader(Protocol):
    """Reads a checkpoint of any strategy and any number of ranks, only the bytes asked for.

    Attributes:
        partial: whether weights and buffers that the checkpoint lacks keep their values.
    """

    partial: bool

    def keys(self) -> Iterable[tuple[str, str]]:
        """The (name, state) pairs that the checkpoint holds."""

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Global shape of one tensor."""

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return one part of a tensor (default: all of it), on the CPU, in the saved dtype."""

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter that is no tensor (numbers, bools, None)."""


class Ranges(NamedTuple):
    """Half-open ranges of one dim of a tensor, in order.

    Attributes:
        dim: which one; negative ones count from the end.
        ranges: (start, stop) of each.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of the ranges of a whole tensor."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(pieces or [whole.narrow(self.dim, 0, 0)], self.dim)


class WeightSource(Protocol):
    """Knows the values of parameters and buffers that so far have a shape and a dtype only."""

    def value(self, name: str, tensor: Tensor, only: Ranges | None = None) -> Tensor:
        """Return the values of a parameter or buffer of a model that was built on meta.

        Args:
            name: its name in the user's model.
            tensor: the parameter or buffer, on the meta device, whole.
            only: the part that is wanted; from a file nothing else is read.

        Returns:
            Fresh memory on the CPU, of the tensor's dtype, and of its shape or the part's.

        Raises:
            UsageError: nothing is known about the tensor.
            CheckpointError: a file has no such values, or they do not fit.
        """


class ParameterPiece(NamedTuple):
    """The place of a tensor in the parameter of which the tensor is a piece, or all.

    Attributes:
        shape: of the parameter, as this rank's modules have it.
        outer_dim: the dim of the parameter that is outermost in memory.
        first: the first element, in the order of the parameter's memory.
        numel: elements of the tensor.
    """

    shape: tuple[int, ...]
    outer_dim: int
    first: int
    numel: int
