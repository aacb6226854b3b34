"""The contract of a store, where tensors live between uses."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class TensorStore(Protocol):
    """Where a shard lives between uses: on the device, in host memory, on disk."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors that ``fetch`` returns."""

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor's values under a key, in place of older values."""

    def fetch(self, key: str) -> Tensor:
        """Return the tensor of a key; raises KeyError when it was never put."""

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start bringing tensors that will be fetched soon."""

    def flush(self) -> None:
        """Return when everything put so far is safely kept."""

    def close(self) -> None:
        """Release memory and files; the store cannot be used afterwards."""


class Pending(Protocol):
    """Something that goes on in the background."""

    def wait(self) -> None:
        """Return when it is over; raises its error, at every call."""

    def done(self) -> bool:
        """Whether it is over, or failed."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A shard whose optimizer state a store keeps: one rank's part of one parameter.

    Attributes:
        numel: its elements.
        dtype: of the master and of the states.
        kept: whether the store keeps the master, too; otherwise it stays in memory elsewhere.
    """

    numel: int
    dtype: torch.dtype
    kept: bool


@dataclass(frozen=True, slots=True)
class ShardStep:
    """One step of an optimizer for one shard.

    Attributes:
        index: which shard of its block.
        group: its param group; read when the step is submitted, not later.
        gradient: 1-D, on the CPU, of any floating dtype; it is not changed.
        master: 1-D, on the CPU, updated in place; None if the store keeps it.
        out: 1-D, on the CPU, of any floating dtype: gets the new parameter; None if that is the
            master. A function returns it, in the background, not long before it is filled.
        factor: of the gradient, in the master's dtype.
    """

    index: int
    group: Mapping[str, Any]
    gradient: Tensor
    master: Tensor | None
    out: Tensor | Callable[[], Tensor] | None = None
    factor: float = 1.0


@runtime_checkable
class ShardStepper(Protocol):
    """Steps shards whose optimizer state lies in a store, one block of shards after the other.

    A block has the shards of one optimizer in one unit. Steps run in the background, in the order
    in which they were submitted.
    """

    def adopt(self, block: str, shards: Sequence[ShardSpec], group: Mapping[str, Any]) -> None:
        """Take room for the states of a block's shards, which have not taken a step.

        Args:
            block: a new name.
            shards: its shards.
            group: a param group like those of its steps: says which states there are.
        """

    def submit(
        self,
        block: str,
        steps: Sequence[ShardStep],
        then: Callable[[], None] | None = None,
    ) -> Pending:
        """Take a step for some shards of a block; their tensors must stay until it is over.

        Args:
            block: its name.
            steps: at most one for each shard.
            then: called in the background when masters and outs are there; the step is over when it
                has returned.
        """

    def states(self, block: str, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the states of a shard as torch names them, and its counter ``step``, if any.

        Waits for submitted steps. Yields nothing before the first step. Tensors are 1-D, or 0-D; a
        store in memory yields the kept tensors.
        """

    def master(self, block: str, index: int) -> Tensor:
        """Return the master of a shard that the store keeps, 1-D."""

    def set_states(self, block: str, index: int, states: Mapping[str, Any]) -> None:
        """Replace the states of a shard; none: as before the first step."""

    def set_master(self, block: str, index: int, values: Tensor) -> None:
        """Replace the master of a shard that the store keeps."""

    def close(self) -> None:
        """Finish submitted steps, then release memory, files and threads."""


@runtime_checkable
class SteppingStore(TensorStore, Protocol):
    """A store that can keep optimizer state and step the state in place.

    Attributes:
        in_memory: whether ``fetch`` returns the kept tensor itself, which can be changed in place;
            known of the class.
        working_bytes: host memory that stepping takes beside the kept tensors, about.
    """

    in_memory: ClassVar[bool]
    working_bytes: ClassVar[int]

    def stepper(self, optimizer: Optimizer) -> ShardStepper | None:
        """Return the stepper for an optimizer's shards; None when only the optimizer itself can."""
