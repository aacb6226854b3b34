"""Batches and outputs nest tensors in containers: walking, moving, cutting and joining them."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def is_tensor(data: Any) -> bool:
    """Whether something is a tensor."""
    return isinstance(data, Tensor)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items as a list, tuple or named tuple of the same class as ``obj``."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return type(obj)(*generator)
    return type(obj)(generator)


def recursively_apply(
    function: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every tensor of a nested container, which keeps its shape and classes.

    Args:
        function: called as ``function(tensor, *args, **kwargs)``.
        data: tensors in lists, tuples, named tuples, mappings and dataclasses.
        args: further arguments of the function.
        test_type: what counts as a tensor.
        error_on_other_type: refuse other leaves instead of returning them as they are.
        kwargs: further keyword arguments of the function.

    Raises:
        TypeError: another leaf was found and ``error_on_other_type`` is set.
    """

    def walk(item: Any) -> Any:
        if test_type(item):
            return function(item, *args, **kwargs)
        if isinstance(item, list | tuple):
            return honor_type(item, (walk(inner) for inner in item))
        if isinstance(item, Mapping):
            return _same_mapping(item, {key: walk(inner) for key, inner in item.items()})
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            fields = [f.name for f in dataclasses.fields(item) if f.init]
            return dataclasses.replace(item, **{n: walk(getattr(item, n)) for n in fields})
        if error_on_other_type:
            raise TypeError(
                f"expected tensors in lists, tuples, mappings or dataclasses, found "
                f"{type(item).__name__}; pass it as an object instead"
            )
        return item

    return walk(data)


def send_to_device(
    data: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
) -> Any:
    """Return the data with every tensor on a device.

    Args:
        data: nested containers; objects with a ``to(device)`` method of their own are asked.
        device: the destination.
        non_blocking: copy asynchronously where the memory allows it.
        skip_keys: keys of mappings whose values stay where they are.
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def move(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.to(device, non_blocking=non_blocking)
        if isinstance(item, list | tuple):
            return honor_type(item, (move(inner) for inner in item))
        if isinstance(item, Mapping):
            moved = {key: v if key in skipped else move(v) for key, v in item.items()}
            return _same_mapping(item, moved)
        if callable(getattr(item, "to", None)) and not isinstance(item, type):
            return item.to(device)
        return recursively_apply(move, item) if dataclasses.is_dataclass(item) else item

    return move(data)


def find_batch_size(data: Any) -> int | None:
    """Return the size of dim 0 of the first tensor with dims; None when there is none."""
    if isinstance(data, Tensor):
        return data.shape[0] if data.dim() else None
    if isinstance(data, Mapping):
        return _first(find_batch_size(item) for item in data.values())
    if isinstance(data, list | tuple):
        return _first(find_batch_size(item) for item in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _first(find_batch_size(getattr(data, f.name)) for f in dataclasses.fields(data))
    return None


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """Return the same rows of every tensor; 0-d tensors stay as they are."""
    return recursively_apply(lambda t: t[tensor_slice] if t.dim() else t, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join a list of equally nested data along a dim of their tensors.

    Raises:
        TypeError: leaves that are no tensors.
    """
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, list | tuple):
        joined = (concatenate([item[i] for item in data], dim) for i in range(len(first)))
        return honor_type(first, joined)
    if isinstance(first, Mapping):
        keys = {key: concatenate([item[key] for item in data], dim) for key in first}
        return _same_mapping(first, keys)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first, **{n: concatenate([getattr(item, n) for item in data], dim) for n in names}
        )
    raise TypeError(f"expected tensors to concatenate, found {type(first).__name__}")


def convert_to_fp32(data: Any) -> Any:
    """Return the data with every bf16 and fp16 tensor in fp32."""
    low = (torch.float16, torch.bfloat16)
    return recursively_apply(
        lambda tensor: tensor.float(), data, test_type=lambda t: is_tensor(t) and t.dtype in low
    )


def _first(sizes: Iterable[int | None]) -> int | None:
    return next((size for size in sizes if size is not None), None)


def _same_mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in the class of ``obj``; output classes of models take keyword arguments."""
    if type(obj) is dict:
        return items
    if dataclasses.is_dataclass(obj):
        return type(obj)(**items)
    return type(obj)(items)  # type: ignore[call-arg]
