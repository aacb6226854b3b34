"""Chooses the modules of a model that are recomputed: repeated blocks, or modules by name."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from drivetrain.errors import UsageError
from drivetrain.parts.blocks import NamedModule, repeated_blocks
from drivetrain.parts.naming import clean_name

_SHOWN = 12


def choose_blocks(
    model: nn.Module, patterns: Sequence[str] = (), *, every: int = 1
) -> list[NamedModule]:
    """Return the modules to recompute.

    Args:
        model: the user's module.
        patterns: names of modules, in which ``*`` stands for any text; none for the blocks that the
            model repeats.
        every: take the first of each ``every`` modules found, so 2 takes half of them.

    Returns:
        (name, module) in the order of registration. A module inside another chosen one is left
        out: it is recomputed with it.

    Raises:
        UsageError: nothing repeats, a pattern matches nothing, ``every`` is below 1, or a module
            around a block is compiled.
    """
    if every < 1:
        raise UsageError(f"expected recompute's every to be 1 or more, found {every}")
    found = _matching(model, patterns) if patterns else repeated_blocks(model)
    if not found:
        raise UsageError(
            f"expected {type(model).__name__} to hold repeated blocks (modules of one class in a "
            f"ModuleList or Sequential), found none among {_names(model)}; name the modules to "
            "recompute, for example blocks=['encoder.*'], or leave this model out with mode='none'"
        )
    _refuse_compiled_around(model, found)
    return found[::every]


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[NamedModule]:
    modules = [(clean_name(name), module) for name, module in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            raise UsageError(
                f"expected {pattern!r} to match a module of {type(model).__name__}, found none; "
                f"its modules: {_names(model)}"
            )
    chosen: list[NamedModule] = []
    for name, module in modules:
        if any(fnmatchcase(name, pattern) for pattern in patterns) and not any(
            module is inner for _, outer in chosen for inner in outer.modules()
        ):
            chosen.append((name, module))
    return chosen


def _refuse_compiled_around(model: nn.Module, blocks: Sequence[NamedModule]) -> None:
    for module in model.modules():
        if not hasattr(module, "_orig_mod"):
            continue
        inside = {id(each) for each in module.modules() if each is not module}
        for name, block in blocks:
            if id(block) in inside:
                raise UsageError(
                    f"expected nothing compiled around the block {name!r}, found a compiled "
                    f"{type(module._orig_mod).__name__}; compile the blocks instead, "
                    "model.blocks[i] = torch.compile(model.blocks[i]), or turn recompute off"
                )


def _names(model: nn.Module) -> str:
    names = [clean_name(name) for name, _ in model.named_modules() if name]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "no modules at all"
