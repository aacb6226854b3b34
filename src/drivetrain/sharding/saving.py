"""What autograd saves of a unit: views without values, which come back when backward asks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from drivetrain.sharding.unit import Unit

_AS_IT_IS: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (
    lambda tensor: tensor,
    lambda packed: packed,
)


def without_values(
    storages: Mapping[int, Unit], bring_back: Callable[[Unit], None]
) -> saved_tensors_hooks:
    """Return the context in which autograd saves views of units without their values.

    Hooks around it, such as those of checkpoints and of offloading, go on working.

    Args:
        storages: units by the identity of their storages.
        bring_back: makes a unit whole.
    """
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or _AS_IT_IS

    def save(tensor: Tensor) -> Any:
        dense = tensor.layout is torch.strided  # others have no storage to ask for
        unit = storages.get(tensor.untyped_storage()._cdata) if dense else None
        return unit, pack(tensor if unit is None else tensor.detach())

    def restore(packed: Any) -> Tensor:
        unit, inner = packed
        if unit is None:
            return unpack(inner)
        bring_back(unit)
        values = unpack(inner)
        # A graph of this backward would save the view itself, without these hooks.
        return values.detach().clone() if torch.is_grad_enabled() else values

    return saved_tensors_hooks(save, restore)
