"""Exchanges between ranks that a script asks for: gather, broadcast and reduce over nested data.

The functions work over the default process group, or without one as a world of one rank. Before
tensors cross ranks, a digest of their structure does: unequal shapes, which crash or hang the
communication library, become an error on every rank, with the shapes of all ranks. Tensors stay on
their device, or take a detour where the library cannot carry them from there. The digests are also
where ranks meet: a rank that comes alone learns which rank is missing, and why.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.collectives.facts import (
    Ranks,
    counts_of_everyone,
    device_of,
    group_of,
    meet_everyone,
    named,
    size_of,
)
from drivetrain.errors import UsageError
from drivetrain.nested import describe, recursively_apply

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class CannotPadNestedTensorWarning(UserWarning):
    """A tensor of ``torch.nested`` was not padded."""


def wait_for_everyone(group: Ranks = None) -> None:
    """Return when every rank has come here.

    Raises:
        CollectiveError: a rank does not come, or came to another collective; the message says
            which, and where it is.
    """
    meet_everyone("wait_for_everyone", group)


def gather(tensor: Any, *, group: Ranks = None) -> Any:
    """Concatenate tensors of all ranks along dim 0; every rank receives the result, detached.

    Args:
        tensor: tensors, nested or not, of equal shapes on all ranks and of any dtype; shape
            (rows, ...) becomes (ranks x rows, ...), and 0-d becomes (ranks,).
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come; the message says which, and what it did last.
        RankMismatchError: structure, shapes or dtypes differ; on every rank.
        TypeError: leaves that are no tensors.
    """
    _check_alike("gather", tensor, group)
    return recursively_apply(lambda leaf: _gather_one(leaf, group), tensor)


def gather_rows(tensor: Any, operation: str, refusal: str = "", *, group: Ranks = None) -> Any:
    """Concatenate tensors along dim 0 of which ranks have different numbers of rows.

    Args:
        tensor: tensors, nested or not, alike on all ranks but for dim 0; a 0-d one is one row.
        operation: its name, for messages.
        refusal: why this rank cannot take part; every rank raises it.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come; the message says which, and what it did last.
        RankMismatchError: structure, other dims or dtypes differ; on every rank.
        UsageError: a rank cannot take part.
        TypeError: leaves that are no tensors.
    """
    counts: list[int] = []

    def counted(leaf: Tensor) -> Tensor:
        counts.append(leaf.shape[0] if leaf.dim() else 1)
        return leaf if leaf.dim() else leaf.reshape(1)

    def gather_one(leaf: Tensor) -> Tensor:
        mine = next(sizes)
        longest = max(mine)
        gathered = _gather_one(_padded(leaf, 0, longest, 0, False), group)
        if min(mine) == longest:
            return gathered
        parts = gathered.unflatten(0, (-1, longest)).unbind()  # type: ignore[no-untyped-call]
        return torch.cat([part[:size] for part, size in zip(parts, mine, strict=True)])

    rows = recursively_apply(counted, tensor)
    shown = describe(rows, lambda t: f"{t.dtype}{tuple(t.shape[1:])}").replace("torch.", "")
    held = counts_of_everyone(operation, shown, counts, refusal, group)
    recursively_apply(lambda leaf: leaf, tensor, error_on_other_type=True)
    sizes = iter(list(zip(*held, strict=True)))
    return recursively_apply(gather_one, rows)


def gather_object(object: Any, *, group: Ranks = None) -> list[Any]:  # noqa: A002 (Accelerate's)
    """Collect objects of all ranks in one list, by rank; every rank receives it.

    Args:
        object: anything that can be pickled; when all ranks pass lists or tuples, their items are
            joined, else the list holds one object per rank.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come; the message says which, and what it did last.
    """
    collected: list[Any] = [object]
    if size_of(group) > 1:
        collected = [None] * size_of(group)
        meet_everyone("gather_object", group, data="objects")
        with named("gather_object", group_of(group)):
            dist.all_gather_object(collected, object, group=group_of(group))
    if all(isinstance(item, list | tuple) for item in collected):
        return [inner for item in collected for inner in item]
    return collected


def broadcast(tensor: Any, from_process: int = 0, *, group: Ranks = None) -> Any:
    """Return one rank's tensors on every rank; the tensors passed in stay as they are.

    Args:
        tensor: tensors, nested or not, of equal shapes on all ranks and of any dtype.
        from_process: global rank whose values are taken.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        RankMismatchError: structure, shapes or dtypes differ; on every rank.
        TypeError: leaves that are no tensors.
        UsageError: no rank ``from_process`` in the group.
    """

    def broadcast_one(leaf: Tensor) -> Tensor:
        sent = _travelling(leaf, group).clone(memory_format=torch.contiguous_format)
        if size_of(group) > 1:
            with named(operation, group_of(group)):
                dist.broadcast(_bytes_of(sent), src=from_process, group=group_of(group))
        return sent.to(leaf.device)

    operation = f"broadcast from rank {from_process}"
    _check_rank(from_process, group)
    _check_alike(operation, tensor, group)
    return recursively_apply(broadcast_one, tensor)


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, group: Ranks = None
) -> list[Any]:
    """Replace the list's items by one rank's, in place, and return the list.

    Args:
        object_list: objects that can be pickled; the other ranks' lists may have any length.
        from_process: global rank whose items are taken.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        UsageError: no rank ``from_process`` in the group.
    """
    _check_rank(from_process, group)
    if size_of(group) > 1:
        # One object, because the library hangs when the lists are not equally long.
        parcel: list[Any] = [object_list]
        operation = f"broadcast_object_list from rank {from_process}"
        meet_everyone(operation, group, data="objects")
        with named(operation, group_of(group)):
            dist.broadcast_object_list(parcel, src=from_process, group=group_of(group))
        object_list[:] = parcel[0]
    return object_list


def reduce(
    tensor: Any,
    reduction: str = "mean",
    scale: float = 1.0,
    *,
    group: Ranks = None,
) -> Any:
    """Combine tensors of all ranks element by element; every rank receives the result, detached.

    Tensors of 16 bits or less are added up in 32 and integers in 64 bits, so that neither overflow
    nor rounding depends on the number of ranks. Results have the dtype that went in, except that a
    mean of integers is a float, and a sum of booleans counts.

    Args:
        tensor: tensors, nested or not, of equal shapes on all ranks.
        reduction: ``sum``, ``mean``, ``max`` or ``none``.
        scale: factor of the result.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        RankMismatchError: structure, shapes, dtypes or the reduction differ; on every rank.
        TypeError: leaves that are no tensors.
        UsageError: an unknown reduction.
    """
    if reduction not in (*_OPERATIONS, "none"):
        raise UsageError(f"expected a reduction of sum, mean, max or none, found {reduction!r}")

    def reduce_one(leaf: Tensor) -> Tensor:
        result = leaf.detach().clone()
        if reduction != "none":
            result = _reduce_one(leaf, reduction, group)
        return result if scale == 1.0 else result * scale

    _check_alike(f"reduce to the {reduction}", tensor, group)
    return recursively_apply(reduce_one, tensor)


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: int = 0,
    pad_first: bool = False,
    *,
    group: Ranks = None,
) -> Any:
    """Pad tensors along a dim to the longest of any rank, so that they can be gathered.

    Args:
        tensor: tensors, nested or not; tensors without that dim stay as they are, and so do
            tensors of ``torch.nested``, with a warning. Ranks may differ in sizes, but not in
            structure, number of dims or dtypes.
        dim: the dim to pad; may be negative.
        pad_index: the value of the padding.
        pad_first: pad at the beginning.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        RankMismatchError: structure, numbers of dims or dtypes differ; on every rank.
        TypeError: leaves that are no tensors.
    """
    lengths: list[int] = []

    def measure(leaf: Tensor) -> Tensor:
        lengths.append(leaf.shape[dim] if _has_dim(leaf, dim) else 0)
        return leaf

    def pad_one(leaf: Tensor) -> Tensor:
        length = next(longest)
        return _padded(leaf, dim, length, pad_index, pad_first) if length else leaf

    recursively_apply(measure, tensor)
    shown = describe(tensor, lambda t: f"{t.dtype} of {t.dim()} dims").replace("torch.", "")
    held = counts_of_everyone("pad_across_processes", shown, lengths, "", group)
    recursively_apply(lambda leaf: leaf, tensor, error_on_other_type=True)
    longest = map(max, zip(*held, strict=True))
    return recursively_apply(pad_one, tensor)


def _gather_one(tensor: Tensor, group: Ranks) -> Tensor:
    mine = _travelling(tensor, group).contiguous()
    mine = mine.unsqueeze(0) if mine.dim() == 0 else mine
    if size_of(group) == 1:
        return mine.to(tensor.device)
    sent = _bytes_of(mine)
    received = sent.new_empty(size_of(group), sent.numel())
    with named("gather", group_of(group)):
        dist.all_gather(list(received.unbind()), sent, group=group_of(group))
    shape = (size_of(group) * mine.shape[0], *mine.shape[1:])
    return received.view(-1).view(mine.dtype).view(shape).to(tensor.device)


def _reduce_one(tensor: Tensor, reduction: str, group: Ranks) -> Tensor:
    kind, result = tensor.dtype, _travelling(tensor, group)
    integers = not (kind.is_floating_point or kind.is_complex)
    if integers:
        result = result.to(torch.int64)
    elif kind.itemsize < 4:
        result = result.to(torch.float32)
    result = result.clone(memory_format=torch.contiguous_format)
    if size_of(group) > 1:
        with named("reduce", group_of(group)):
            dist.all_reduce(result, op=_OPERATIONS[reduction], group=group_of(group))
    result = result.to(tensor.device)
    if reduction == "mean":
        result = result / size_of(group)
    counts = integers and (reduction == "mean" or (reduction == "sum" and kind == torch.bool))
    return result if counts else result.to(kind)


def _has_dim(tensor: Tensor, dim: int) -> bool:
    if tensor.is_nested:  # its rows have sizes of their own
        warnings.warn(
            "pad_across_processes leaves a tensor of torch.nested as it is: its rows differ in "
            "size; pad it first, with torch.nested.to_padded_tensor",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
        return False
    return -tensor.dim() <= dim < tensor.dim()


def _padded(tensor: Tensor, dim: int, longest: int, value: int, first: bool) -> Tensor:
    missing = longest - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    padding = tensor.new_full(shape, value)
    return torch.cat([padding, tensor] if first else [tensor, padding], dim=dim)


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes: values that only travel may have any dtype."""
    return tensor.view(-1).view(torch.uint8)


def _travelling(tensor: Tensor, group: Ranks) -> Tensor:
    """Return the values, without their history, on a device that the group can send from."""
    return tensor.detach().to(device_of(group, tensor.device))


def _check_rank(rank: int, group: Ranks) -> None:
    ranks = dist.get_process_group_ranks(group_of(group)) if size_of(group) > 1 else [0]
    if rank not in ranks:
        raise UsageError(f"expected from_process to be one of the ranks {ranks}, found {rank}")


def _check_alike(operation: str, data: Any, group: Ranks) -> None:
    """Raise on every rank when operations, or the shapes and kinds of data, differ."""
    if size_of(group) > 1:
        shown = describe(data, lambda t: f"{t.dtype}{tuple(t.shape)}").replace("torch.", "")
        meet_everyone(operation, group, data=shown)
    # After the digests: no rank may leave before the others have learned of it.
    recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
