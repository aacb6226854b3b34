"""What a script lets ranks tell each other: gather, broadcast and reduce over nested data.

The functions work over the default process group, or without one as a world of one rank. Before
tensors cross ranks, a digest of their structure does: unequal shapes, which crash or hang the
communication library, become an error on every rank that shows what each of them holds.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.errors import RankMismatchError, UsageError
from drivetrain.nested import recursively_apply

_BOTH = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def wait_for_everyone(group: dist.ProcessGroup | None = None) -> None:
    """Return when every rank has come here."""
    if _size(group) > 1:
        dist.barrier(group)


def gather(data: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """Concatenate tensors of all ranks along dim 0; every rank receives the result.

    Args:
        data: tensors, nested or not, of equal shapes on all ranks; 0-d ones become one element.
        group: the ranks; None means all.

    Raises:
        RankMismatchError: structure, shapes or dtypes differ; on every rank.
        TypeError: leaves that are no tensors.
    """

    def gather_one(tensor: Tensor) -> Tensor:
        mine = tensor.detach().contiguous()
        mine = mine.unsqueeze(0) if mine.dim() == 0 else mine
        parts = [torch.empty_like(mine) for _ in range(_size(group))]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts)

    if _size(group) == 1:
        return recursively_apply(_at_least_1d, data, error_on_other_type=True)
    _same_structure("gather", data, group)
    return recursively_apply(gather_one, data, error_on_other_type=True)


def gather_object(data: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """Collect objects of all ranks; lists are joined into one list.

    Args:
        data: anything that can be pickled.
        group: the ranks; None means all.
    """
    if _size(group) == 1:
        return data
    collected: list[Any] = [None] * _size(group)
    dist.all_gather_object(collected, data, group=group)
    if all(isinstance(item, list | tuple) for item in collected):
        return [inner for item in collected for inner in item]
    return collected


def broadcast(data: Any, from_process: int = 0, *, group: dist.ProcessGroup | None = None) -> Any:
    """Return one rank's tensors on every rank.

    Args:
        data: tensors, nested or not, of equal shapes on all ranks.
        from_process: global rank whose values are taken.
        group: the ranks; None means all.

    Raises:
        RankMismatchError: structure, shapes or dtypes differ; on every rank.
    """

    def broadcast_one(tensor: Tensor) -> Tensor:
        result = tensor.detach().contiguous().clone()
        dist.broadcast(result, src=from_process, group=group)
        return result

    if _size(group) == 1:
        return data
    _same_structure("broadcast", data, group)
    return recursively_apply(broadcast_one, data, error_on_other_type=True)


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Replace the list's items by those of one rank, in place, and return the list."""
    if _size(group) > 1:
        dist.broadcast_object_list(object_list, src=from_process, group=group)
    return object_list


def reduce(
    data: Any,
    reduction: str = "mean",
    scale: float = 1.0,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Combine tensors of all ranks element by element; every rank receives the result.

    Args:
        data: tensors, nested or not, of equal shapes on all ranks.
        reduction: ``sum``, ``mean``, ``max`` or ``none``.
        scale: factor of the result.
        group: the ranks; None means all.

    Raises:
        RankMismatchError: structure, shapes or dtypes differ; on every rank.
        UsageError: an unknown reduction.
    """
    if reduction not in (*_BOTH, "none"):
        raise UsageError(f"expected a reduction of sum, mean, max or none, found {reduction!r}")
    size = _size(group)

    def reduce_one(tensor: Tensor) -> Tensor:
        result = tensor.detach().contiguous().clone()
        if size > 1 and reduction != "none":
            dist.all_reduce(result, op=_BOTH[reduction], group=group)
        if reduction == "mean" and size > 1:
            result = result / size
        return result if scale == 1.0 else result * scale

    if size > 1 and reduction != "none":
        _same_structure("reduce", data, group)
    return recursively_apply(reduce_one, data, error_on_other_type=True)


def pad_across_processes(
    data: Any,
    dim: int = 0,
    pad_index: int = 0,
    pad_first: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Pad tensors along a dim to the longest of any rank, so that they can be gathered.

    Args:
        data: tensors, nested or not; tensors without that dim stay as they are.
        dim: the dim to pad; may be negative.
        pad_index: the value of the padding.
        pad_first: pad at the beginning.
        group: the ranks; None means all.
    """

    def pad_one(tensor: Tensor) -> Tensor:
        if not -tensor.dim() <= dim < tensor.dim():
            return tensor
        along = dim % tensor.dim()
        sizes = gather(torch.tensor([tensor.shape[along]], device=tensor.device), group=group)
        longest, mine = int(sizes.max()), tensor.shape[along]
        if longest == mine:
            return tensor
        shape = list(tensor.shape)
        shape[along] = longest
        padded = tensor.new_full(shape, pad_index)
        padded.narrow(along, longest - mine if pad_first else 0, mine).copy_(tensor)
        return padded

    return recursively_apply(pad_one, data, error_on_other_type=True)


def _size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _at_least_1d(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0) if tensor.dim() == 0 else tensor


def _describe(data: Any) -> str:
    """Return structure, shapes and dtypes as text that is equal when they are."""
    return str(
        recursively_apply(
            lambda t: _Text(f"{t.dtype}{tuple(t.shape)}".removeprefix("torch.")), data
        )
    )


class _Text(str):
    """Text that shows itself without quotes inside containers."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _same_structure(operation: str, data: Any, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank when the ranks' data differ in structure, shape or dtype."""
    text = _guarded(_describe, data)
    digest = hashlib.sha256(text.encode()).digest()[:8]
    device = _device_of(group)
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    digests = [torch.empty_like(mine) for _ in range(_size(group))]
    dist.all_gather(digests, mine, group=group)
    if all(torch.equal(other, digests[0]) for other in digests):
        return
    texts: list[str] = [""] * _size(group)
    dist.all_gather_object(texts, text, group=group)
    shown = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(texts))
    raise RankMismatchError(
        f"{operation} expected equal structure, shapes and dtypes on all ranks, found {shown}; "
        "pad with pad_across_processes first, or use gather_object"
    )


def _guarded(describe: Callable[[Any], str], data: Any) -> str:
    """Describe the data, or say why not: no rank may raise before the digests are exchanged."""
    try:
        return describe(data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device on which the group can communicate."""
    if "gloo" in str(dist.get_backend(group)):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return accelerator if accelerator is not None else torch.device("cpu")
