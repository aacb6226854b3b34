"""The plan of one module of a list, such as an expert, for the modules of the list that are alike.

A look sees only the experts that some token has chosen. One that is not called has the code and the
shapes of the others, so the layers in it are divided as theirs.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from drivetrain_megatron.plan.divide import GroupPlan, SizeAttribute


def alike(block: nn.Module, group: GroupPlan) -> Iterator[GroupPlan]:
    """Yield the plans of the same layers in alike modules of the innermost list around them."""
    name = group.row
    while name:
        around, _, _ = name.rpartition(".")
        if isinstance(block.get_submodule(around), nn.ModuleList):
            break
        name = around
    members = [*group.columns, *(number.module for number in group.numbers)]
    if not name or not all(f"{member}.".startswith(f"{name}.") for member in members):
        return
    model = block.get_submodule(name)
    for index, other in block.get_submodule(around).named_children():
        if other is not model and _kind(other) == _kind(model):
            yield _renamed(group, name, f"{around}.{index}".strip("."))


def same_in_list(block: nn.Module, layer: str) -> Iterator[str]:
    """Yield the names of a layer and of its equals in alike modules of a list (experts)."""
    yield layer
    for name, module in block.named_modules():
        index, _, rest = layer.removeprefix(f"{name}." if name else "").partition(".")
        children = dict(module.named_children())
        if isinstance(module, nn.ModuleList) and f"{layer}.".startswith(f"{name}.".lstrip(".")):
            mine = children.get(index)
            for other, child in children.items():
                if mine is not None and child is not mine and _kind(child) == _kind(mine):
                    yield ".".join(part for part in (name, other, rest) if part)


def _kind(module: nn.Module) -> object:
    return type(module), [(name, tuple(p.shape)) for name, p in module.named_parameters()]


def _renamed(group: GroupPlan, before: str, after: str) -> GroupPlan:
    """Return the plan with the name of one module in place of that of another."""

    def named(name: str) -> str:
        return after + name.removeprefix(before)

    return replace(
        group,
        columns={named(name): partition for name, partition in group.columns.items()},
        row=named(group.row),
        entrance=group.entrance and named(group.entrance),
        numbers={
            SizeAttribute(named(number.module), number.attribute): values
            for number, values in group.numbers.items()
        },
    )
