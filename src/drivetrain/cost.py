"""A strategy's promise of the bytes it holds and sends, and the facts of a model for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from drivetrain.shards import outer_dim


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter or buffer as cost estimates see it.

    Attributes:
        name: in the user's model.
        shape: the global shape.
        dtype: as the user gave it.
        trainable: whether it requires gradients.
        outer_dim: the dim whose slices lie one after the other in memory: 0 unless transposed. Dims
            of size 1 have one slice only and do not count.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    outer_dim: int = 0

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorSpec":
        """Describe a tensor, which may live on the meta device."""
        shape = tuple(tensor.shape)
        return cls(name, shape, tensor.dtype, tensor.requires_grad, outer_dim(tensor))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about a model and its optimizer that decide the cost of a strategy.

    Attributes:
        parameters: distinct parameters, tied ones once, in registration order.
        buffers: distinct buffers.
        states: parameter-shaped tensors that the optimizer keeps for each trainable parameter:
            2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
        module: the model itself, for a strategy whose cost depends on how the model computes; not
            changed. None where only sizes are known: such a strategy then estimates.
        inputs: of one forward on one data-parallel rank, positional and by name. None: unknown, and
            activations that a strategy sends are no part of its cost.
    """

    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...] = ()
    states: int = 2
    module: nn.Module | None = field(default=None, repr=False, compare=False)
    inputs: tuple[Sequence[Any], Mapping[str, Any]] | None = field(
        default=None, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        states: int = 2,
        inputs: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> "ModelSpec":
        """Describe a model as the user has it, before ``prepare``.

        Args:
            model: its parameters may live on the meta device.
            states: see the attributes.
            inputs: see the attributes.
        """
        return cls(
            tuple(TensorSpec.of(name, parameter) for name, parameter in model.named_parameters()),
            tuple(
                TensorSpec(name, tuple(b.shape), b.dtype, False)
                for name, b in model.named_buffers()
            ),
            states,
            model,
            inputs,
        )


def states_of(optimizer: Optimizer, group: Mapping[str, object]) -> int:
    """Return how many tensors like itself an optimizer keeps for a parameter of a group."""
    if isinstance(optimizer, SGD):
        return 1 if group["momentum"] else 0
    if isinstance(optimizer, Adagrad):
        return 1
    if isinstance(optimizer, Adam):  # and AdamW
        return 3 if group["amsgrad"] else 2
    return 2  # unknown: most keep two moments


HOST, DISK = " in host memory", " on disk"
"""Ends of the names of kinds that do not lie on the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A strategy's promise: a conformance test holds it to these numbers.

    Attributes:
        held: bytes kept on one rank between steps, by kind: ``parameters``, ``gradients``,
            ``optimizer``, ``buffers``; the ends of names say what does not lie on the device.
        sent: bytes that rank 0 sends in one optimizer step, by (axis, operation).
        uncounted: messages of unknown size by axis, such as ``activations`` when ``ModelSpec`` has
            no inputs.
    """

    held: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[tuple[str, str], int] = field(default_factory=dict)
    uncounted: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_device(self) -> int:
        """Bytes kept on the device."""
        return sum(n for kind, n in self.held.items() if not kind.endswith((HOST, DISK)))

    @property
    def in_host_memory(self) -> int:
        """Bytes kept in host memory beside the device."""
        return sum(n for kind, n in self.held.items() if kind.endswith(HOST))

    @property
    def on_disk(self) -> int:
        """Bytes kept on a disk."""
        return sum(n for kind, n in self.held.items() if kind.endswith(DISK))

    @property
    def total_held(self) -> int:
        """Bytes kept on one rank."""
        return sum(self.held.values())

    @property
    def total_sent(self) -> int:
        """Bytes sent by one rank in one optimizer step, as far as they are counted."""
        return sum(self.sent.values())
