"""Loading of optimizer state, for replicated and sharded models alike."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError
from drivetrain.shards import Reader, label

Shapes = Mapping[tuple[str, str], tuple[int, ...]]


def check_fits(
    reader: Reader,
    expected: Mapping[tuple[str, str], tuple[int, ...]],
    held: set[tuple[int, str]],
) -> None:
    """Refuse a checkpoint of another model, or with state that no optimizer here holds.

    Args:
        reader: the checkpoint.
        expected: global shape of every parameter and buffer by (name, "").
        held: (index of an optimizer, name of a parameter that it holds).

    Raises:
        CheckpointError: lists the first differing names and shapes.
    """
    found = {
        (name, state): reader.shape(name, state)
        for name, state in sorted(reader.keys())
        if not state or (int(state.partition(".")[0]), name) not in held
    }
    difference = describe_difference(expected, found)
    if difference:
        raise CheckpointError(f"the checkpoint does not fit this model: {difference}")


def describe_difference(expected: Shapes, found: Shapes, *, first: int = 8) -> str:
    """Return a message with the first differing names and shapes, "" when nothing differs.

    Args:
        expected: what the model and its optimizers have: (name, state) -> global shape.
        found: what the checkpoint has.
        first: how many differences of each kind are listed.
    """
    missing = [label(*key) for key in expected if key not in found]
    surplus = [label(*key) for key in found if key not in expected]
    shapes = [
        f"{label(*key)}: expected {tuple(expected[key])}, found {tuple(found[key])}"
        for key in expected
        if key in found and tuple(expected[key]) != tuple(found[key])
    ]
    kinds = (
        ("missing from the checkpoint", missing),
        ("in the checkpoint only", surplus),
        ("of another shape", shapes),
    )
    texts = [f"{len(items)} {what}: {_some(items, first)}" for what, items in kinds if items]
    if not texts:
        return ""
    return (
        f"expected {len(expected)} tensors, found {len(found)} in the checkpoint; "
        f"{'; '.join(texts)}. Load it into the model and optimizers it was saved from"
    )


def _some(items: list[str], first: int) -> str:
    more = len(items) - first
    return ", ".join(items[:first]) + (f", and {more} more" if more > 0 else "")


def state_keys(reader: Reader) -> dict[tuple[str, int], list[str]]:
    """Return the saved keys of tensors by (name of the parameter, index of the optimizer)."""
    keys: dict[tuple[str, int], list[str]] = {}
    for name, state in sorted(reader.keys()):
        if state:
            index, _, key = state.partition(".")
            keys.setdefault((name, int(index)), []).append(key)
    return keys


def group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the parameter group that holds a parameter."""
    return next(
        group
        for group in optimizer.param_groups
        if any(member is parameter for member in group["params"])
    )


def allocate_state(
    values: Tensor, key: str, parameter: nn.Parameter, group: Mapping[str, Any]
) -> Tensor:
    """Return an empty state tensor, of the dtype and on the device that torch's optimizers use."""
    if key == "step":
        on_device = bool(group.get("capturable") or group.get("fused"))
        return torch.empty_like(values, device=parameter.device if on_device else "cpu")
    if values.shape == parameter.shape:
        dtype = parameter.dtype if values.is_floating_point() else values.dtype
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty_like(values, device=parameter.device)
