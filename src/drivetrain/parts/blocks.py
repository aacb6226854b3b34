"""Finds the repeated blocks of a model, such as its transformer layers, by where they stand."""

from collections import Counter
from typing import TypeAlias

from torch import nn

from drivetrain.parts.naming import clean_name

_LISTS = nn.ModuleList | nn.Sequential
_NEVER_CALLED = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict

NamedModule: TypeAlias = tuple[str, nn.Module]


def repeated_blocks(model: nn.Module) -> list[NamedModule]:
    """Return the blocks that a model repeats, under the names of the user's uncompiled model.

    A block stands in a ``ModuleList`` or ``Sequential`` together with another of its class, holds
    parameters, and is more than one layer of ``torch.nn``. The outermost lists count: blocks inside
    of blocks are not looked for. A list inside a list is a block only when there are none in it.

    Returns:
        (name, module) of each block in the order of registration; a module that stands in several
        places comes once, under its first name. Empty when nothing repeats.
    """
    distinct: dict[int, NamedModule] = {}
    for name, block in _search(model, ""):
        distinct.setdefault(id(block), (clean_name(name), block))
    return list(distinct.values())


def _search(module: nn.Module, prefix: str) -> list[NamedModule]:
    children = [
        (prefix + name, child) for name, child in module._modules.items() if child is not None
    ]
    if not isinstance(module, _LISTS):
        return [block for name, child in children for block in _search(child, f"{name}.")]
    counts = Counter(_kind(child) for _, child in children)
    found = []
    for name, child in children:
        inside = _search(child, f"{name}.")
        repeated = _is_block(child) and counts[_kind(child)] > 1
        if repeated and not (inside and isinstance(child, nn.Sequential)):
            found.append((name, child))
        else:
            found += inside
    return found


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return the class, of the module inside when the module is a compiled one."""
    inner = getattr(module, "_orig_mod", None)
    return type(inner) if isinstance(inner, nn.Module) else type(module)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _NEVER_CALLED) or next(module.parameters(), None) is None:
        return False
    whole = next(module.children(), None) is not None
    return whole or not type(module).__module__.startswith("torch.nn.")
