"""Makes tensors equal to rank 0's: parameters and buffers at first, buffers after backward."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.autograd.grad_mode
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.parts.wrapping import UninheritedHook

# --- tensors that share memory: who moves parameters would untie them without a word ---


def check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are trained and share elements with others, or among themselves.

    One process would update all of them by a step of one. In memory of their own they would part.

    Args:
        tensors: parameters and buffers by name, each object once; any shapes and strides.

    Raises:
        UsageError: names the tensors.
    """
    sharing: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            _check_by_itself(name, tensor)
            sharing[tensor.untyped_storage()._cdata].append((name, tensor))
    for members in sharing.values():
        if len(members) > 1:
            _check_storage(members)


def distinct(tensor: Tensor) -> Tensor:
    """Return the elements of an expanded tensor that lie at different places."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _check_by_itself(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and distinct(tensor).numel() != tensor.numel():
        raise UsageError(
            f"expected parameters with a place in memory for each element, found {name!r}, which "
            "is expanded: no optimizer can update it; train what it is expanded from, or a "
            "clone() of it"
        )


def _check_storage(members: Sequence[tuple[str, Tensor]]) -> None:
    near: list[tuple[str, Tensor]] = []
    for name, tensor in sorted(members, key=lambda member: _span(member[1])):
        near = [(other, one) for other, one in near if _span(one)[1] > _span(tensor)[0]]
        for other, one in near:
            if (one.requires_grad or tensor.requires_grad) and _meet(one, tensor):
                raise UsageError(
                    f"expected parameters with memory of their own, found {other!r} and {name!r}, "
                    "which share elements without being one parameter; tie weights by the "
                    "parameter itself (head.weight = embedding.weight), or clone() one of them"
                )
        near.append((name, tensor))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _meet(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors whose spans overlap have an element in common."""
    if one.itemsize != other.itemsize:
        return True
    spans = _span(one), _span(other)
    first, stop = (edge // one.itemsize for edge in (min(spans)[0], max(s[1] for s in spans)))
    taken = torch.zeros(stop - first, dtype=torch.bool, device="cpu")
    _place(taken, distinct(one), first).fill_(True)
    return bool(_place(taken, other, first).any())


def _place(taken: Tensor, tensor: Tensor, first: int) -> Tensor:
    return taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first)


# --- equal values ---


_MOST_BYTES = 32 << 20
"""Most bytes in one message: replicating a model must not need a second one in memory."""


def replicate(
    tensors: Iterable[Tensor], communicator: Communicator, label: str, *, source: int = 0
) -> None:
    """Copy tensors from one rank, tensors of equal dtype and device together.

    Args:
        tensors: any shapes and strides, expanded ones too; the same on every rank.
        communicator: over the ranks that hold a copy.
        label: name of the messages in errors.
        source: index on the axis of the rank that has the right values.
    """
    if communicator.size == 1:
        return
    with torch.no_grad():
        for group in _groups(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            communicator.broadcast(flat, source, label=label).wait()
            if communicator.rank != source:
                _scatter(flat, group)


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        piece = flat[offset : offset + tensor.numel()].view(tensor.shape)
        # A buffer that autograd saved in an earlier forward stays valid for its backward.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):
            tensor.copy_(piece)
        offset += tensor.numel()


def _groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(distinct(tensor.detach()))
    for group in kinds.values():
        batch: list[Tensor] = []
        nbytes = 0
        for tensor in group:
            if batch and nbytes + tensor.nbytes > _MOST_BYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(tensor)
            nbytes += tensor.nbytes
        yield batch


class ForwardHook(UninheritedHook):
    """A forward pre-hook that acts before training forwards, in the model itself only.

    Args:
        action: called, without arguments, before each training forward with gradients.
    """

    def __call__(self, *arguments: Any) -> None:
        """Act before a training forward, but not when a checkpoint recomputes it in backward."""
        recomputing = torch._C._current_graph_task_id() != -1
        training = arguments[0].training and torch.is_grad_enabled()
        if self._action is not None and training and not recomputing:
            self._action()
