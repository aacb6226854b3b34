"""Pieces of training state in coordinates of whole tensors: what strategies save and load."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a global tensor a shard holds.

    Attributes:
        offsets: first index of the box, per dim.
        sizes: extent of the box, per dim.
        flat: None for the whole box, or a half-open range of the flattened box: a flat range
            inside a tensor-parallel shard is a box with a range.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: tuple[int, int] | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Part":
        """Return the part that is the whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def range_of(cls, shape: Sequence[int], start: int, stop: int) -> "Part":
        """Return a half-open range of the flattened tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape), (start, stop))


@dataclass(frozen=True, slots=True)
class Shard:
    """One piece of the training state, in global coordinates.

    Attributes:
        name: the parameter's or buffer's name in the user's model.
        state: "" for the parameter or buffer itself, else ``INDEX.KEY``: the optimizer's index in
            ``prepare`` and its state key, for example ``0.exp_avg``.
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


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One parameter or persistent buffer of the user's whole model.

    Attributes:
        name: in the user's model.
        shape: the global shape.
        dtype: as the model holds it.
        identity: equal for tied tensors.
        trainable: whether it is a parameter that requires gradients.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: Hashable
    trainable: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorFacts":
        """Describe a tensor that this rank has whole; tied names share the very same object."""
        return cls(name, tuple(tensor.shape), tensor.dtype, id(tensor), tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what a module's state dict holds: the objects themselves, perhaps without memory."""
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def parameters_among(tensors: Iterable[Tensor]) -> list[nn.Parameter]:
    """Return the distinct parameters."""
    return list({id(p): p for p in tensors if isinstance(p, nn.Parameter)}.values())


class Reader(Protocol):
    """Reads a checkpoint of any strategy and any number of ranks, only the bytes asked for."""

    def keys(self) -> Iterable[tuple[str, str]]:
        """The (name, state) pairs that the checkpoint holds."""

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Global shape of one tensor."""

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return one part of a tensor (default: all of it), on the CPU, in the saved dtype."""

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter that is no tensor (numbers, bools, None)."""
