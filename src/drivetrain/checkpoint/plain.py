"""Plain values as JSON and back, exactly: all of a checkpoint but the tensors of a model.

Plain means None, bool, int, float, str, list, tuple, dict with str or int keys, Counter, and
tensors inside these. JSON lacks tuples, int keys, nan and infinities: they become objects with a
single key that starts with ``$``. Tensors go to a safetensors file and leave their key behind.
Nothing else is accepted: reading a checkpoint must never run code.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import CheckpointError


def check_plain(value: Any, where: str) -> None:
    """Refuse a value, named ``where`` in the message, that a checkpoint cannot hold."""
    encode(value, where, {})


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Return the value as JSON can hold it.

    Args:
        value: a plain value.
        where: its path, for messages and as the key of tensors.
        tensors: gets the tensors found inside, to be stored beside the JSON.

    Raises:
        CheckpointError: the value is not plain; the message names the path to the culprit.
    """
    try:
        return _encode(value, where, tensors)
    except RecursionError:
        raise CheckpointError(
            f"{where} contains itself or is nested too deeply; a checkpoint holds plain values only"
        ) from None


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that ``encode`` was given, from parsed JSON and the stored tensors by key.

    Raises:
        CheckpointError: a tag that this version does not know, or a tensor that is not there.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    try:
        return _untag(tag, value[tag], tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"expected a known tag with its value, found {{{tag!r}: ...}} ({error!r}); the state "
            "is damaged or was written by a newer version"
        ) from error


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value, where, tensors)}
    if type(value) in (list, tuple, torch.Size):
        items = [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) is Counter:
        return {"$counter": _pairs(value, where, tensors)}
    if type(value) in (dict, OrderedDict, defaultdict):
        return _mapping(value, where, tensors)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold; state must be tensors and plain values: None, bool, int, float, str, and "
        "lists, tuples and dicts of these (code is never stored). Let state_dict() return such"
    )


def _mapping(value: Mapping[Any, Any], where: str, tensors: dict[str, Tensor]) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
    return {"$dict": _pairs(value, where, tensors)}


def _pairs(value: Mapping[Any, Any], where: str, tensors: dict[str, Tensor]) -> list[list[Any]]:
    for key in value:
        if type(key) not in (str, int):
            raise CheckpointError(
                f"{where} has the key {key!r} of type {type(key).__qualname__}; "
                "the keys of a dict in a checkpoint must be str or int"
            )
    return [[key, _encode(item, f"{where}[{key!r}]", tensors)] for key, item in value.items()]


def _keep(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    key = where
    while key in tensors:  # two paths can read alike when keys contain dots
        key += "'"
    tensors[key] = tensor
    return key


def _untag(tag: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if tag == "$tensor":
        return tensors[value]
    if tag == "$float":
        return float(value)
    if tag == "$tuple":
        return tuple(decode(item, tensors) for item in value)
    if tag in ("$dict", "$counter"):
        pairs = {key: decode(item, tensors) for key, item in value}
        return Counter(pairs) if tag == "$counter" else pairs
    raise KeyError(tag)
