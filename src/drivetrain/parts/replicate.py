"""Makes tensors equal to rank 0's: parameters and buffers at first, buffers after backward."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.autograd.grad_mode
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.parts.overlap import distinct
from drivetrain.parts.wrapping import UninheritedHook

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
