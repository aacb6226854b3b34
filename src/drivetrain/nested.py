"""Batches and outputs nest tensors in containers: walking, moving, cutting and joining them."""

import copy
import dataclasses
import inspect
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError


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
        test_type: whether an object counts as a tensor.
        error_on_other_type: refuse other leaves instead of returning them as they are.
        kwargs: further keyword arguments of the function.

    Raises:
        TypeError: another leaf was found and ``error_on_other_type`` is set.
    """

    def walk(item: Any) -> Any:
        if test_type(item):
            return function(item, *args, **kwargs)
        if (parts := _parts(item)) is not None:
            return _with_parts(item, {key: walk(inner) for key, inner in parts.items()})
        if error_on_other_type:
            raise TypeError(
                f"expected tensors in lists, tuples, mappings or dataclasses, found "
                f"{type(item).__name__}; pass it as an object instead"
            )
        return item

    return walk(data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
) -> Any:
    """Return data with every tensor on a device.

    Objects with a ``to`` of their own (packed sequences, tokenizer outputs) are asked to move
    themselves; a mapping of which keys are skipped is moved item by item instead.

    Args:
        tensor: tensors in nested containers; other objects stay as they are.
        device: the destination.
        non_blocking: copy asynchronously where the memory allows it.
        skip_keys: keys of mappings whose values stay where they are.
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def move(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.to(device, non_blocking=non_blocking)
        stay = skipped & set(item) if isinstance(item, Mapping) else ()
        if _can_move(item) and not stay:
            return _move_itself(item, device, non_blocking)
        if (parts := _parts(item)) is None:
            return item
        return _with_parts(item, {k: v if k in stay else move(v) for k, v in parts.items()})

    return move(tensor)


def describe(data: Any, show: Callable[[Tensor], str]) -> str:
    """Return the structure as text, equal for data nested alike whose tensors show alike.

    Args:
        data: tensors in nested containers; other leaves show their class.
        show: the text of a tensor.
    """
    if isinstance(data, Tensor):
        return show(data)
    if isinstance(data, Mapping):
        items = [f"{key!r}: {describe(item, show)}" for key, item in data.items()]
    elif isinstance(data, list | tuple):
        items = [describe(item, show) for item in data]
    elif (parts := _parts(data)) is not None:
        items = [f"{name}={describe(item, show)}" for name, item in parts.items()]
    else:
        return type(data).__name__
    return f"{type(data).__name__}({', '.join(items)})"


def find_batch_size(data: Any) -> int | None:
    """Return the size of dim 0 of the first tensor with dims; None when there is none."""
    if isinstance(data, Tensor):
        return data.shape[0] if data.dim() else None
    sizes = map(find_batch_size, (_parts(data) or {}).values())
    return next((size for size in sizes if size is not None), None)


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """Return the same rows of every tensor; 0-d tensors stay as they are."""
    return recursively_apply(lambda t: t[tensor_slice] if t.dim() else t, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join a list of equally nested data along a dim of their tensors.

    Raises:
        UsageError: the list is empty, or the data are not nested alike.
        TypeError: leaves that are no tensors, of several items.
    """
    if not data:
        raise UsageError("expected at least one item to concatenate, found an empty list")
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, list | tuple):
        _check_alike("items", [len(item) for item in data])
    elif isinstance(first, Mapping):
        _check_alike("keys", [sorted(map(str, item)) for item in data])
    if (parts := _parts(first)) is not None:
        rows = [_parts(item) or {} for item in data]
        return _with_parts(first, {k: concatenate([row[k] for row in rows], dim) for k in parts})
    if len(data) == 1:
        return first
    raise TypeError(
        f"expected tensors to concatenate, found {type(first).__name__}; use gather_object or a "
        "list for what is no tensor"
    )


def convert_to_fp32(data: Any) -> Any:
    """Return the data with every bf16 and fp16 tensor in fp32."""
    low = (torch.float16, torch.bfloat16)
    return recursively_apply(
        lambda tensor: tensor.float(), data, test_type=lambda t: is_tensor(t) and t.dtype in low
    )


def _check_alike(what: str, found: list[Any]) -> None:
    if any(other != found[0] for other in found):
        raise UsageError(f"expected data nested alike to concatenate, found {what} {found}")


def _can_move(item: Any) -> bool:
    return callable(getattr(item, "to", None)) and not isinstance(item, type)


def _move_itself(item: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    if non_blocking and _takes_non_blocking(item.to):
        return item.to(device, non_blocking=non_blocking)
    return item.to(device)


def _takes_non_blocking(to: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(to).parameters
    except ValueError:  # written in C, says nothing about itself
        return False
    return "non_blocking" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _parts(item: Any) -> Mapping[Any, Any] | None:
    """Return what a container holds, by key, index or name; None of anything else."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, list | tuple):
        return dict(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return None


def _with_parts(item: Any, parts: dict[Any, Any]) -> Any:
    """Return a container of the same class that holds something else."""
    if isinstance(item, list | tuple):
        return honor_type(item, parts.values())
    if isinstance(item, Mapping):
        return _same_mapping(item, parts)
    result = copy.copy(item)  # by copy, because a constructor may take or check more
    for name, value in parts.items():
        object.__setattr__(result, name, value)  # frozen ones as well
    return result


def _same_mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in the class of ``obj``, which may carry more than its items."""
    if type(obj) is dict:
        return items
    if dataclasses.is_dataclass(obj):  # output classes of models take keyword arguments
        return type(obj)(**items)
    if isinstance(obj, MutableMapping):  # a default factory, encodings: the copy keeps them
        result = copy.copy(obj)
        for key, value in items.items():
            result[key] = value
        return result
    return type(obj)(items)  # type: ignore[call-arg]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)
