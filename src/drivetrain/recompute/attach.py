"""Chooses the modules that are recomputed, and puts a recomputing forward into them.

The forward stands in a module's own ``__dict__``, and is taken out again by ``restore``. Hooks on
the block, as strategies set them, run once per forward and are not recomputed.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from drivetrain.errors import UsageError
from drivetrain.parts.blocks import NamedModule, repeated_blocks
from drivetrain.parts.guard import Arguments, Function, Keywords
from drivetrain.parts.naming import clean_name
from drivetrain.parts.wrapping import is_wrapped, unwrap_forward, wrap_forward
from drivetrain.recompute.inputs import KeptInputs
from drivetrain.recompute.replay import Contexts, UnchangedBuffers, replay, selective_contexts

Mode: TypeAlias = Literal["full", "selective"]

_ORIGINAL = "_forward_before_recompute"
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


def attach(blocks: Iterable[NamedModule], mode: Mode, inputs: KeptInputs | None = None) -> None:
    """Let blocks be recomputed in backward; a block that was attached before is attached anew.

    While a block is in eval mode, or gradients are off, its forward is called as it is. A deep copy
    of a block recomputes too, with its own parameters; a pickled one computes as its class says.

    Args:
        blocks: (name, module), changed in place; ``restore`` undoes it.
        mode: ``full`` keeps inputs only; ``selective`` also the results of projections.
        inputs: where the inputs wait; None leaves them where they are.

    Raises:
        UsageError: a block is compiled in a way in which it cannot be recomputed; no block is
            changed then.
    """
    chosen = list(blocks)
    for name, block in chosen:
        _refuse_compiled(name, block, mode)
    for _, block in chosen:
        _wrap(block, mode, inputs or KeptInputs())


def restore(model: nn.Module) -> None:
    """Give every block of a model back the forward it had before ``attach``."""
    for module in model.modules():
        unwrap_forward(module, _ORIGINAL)


def is_attached(model: nn.Module) -> bool:
    """Whether a block of a model is recomputed."""
    return any(is_wrapped(module, _ORIGINAL) for module in model.modules())


def _wrap(block: nn.Module, mode: Mode, inputs: KeptInputs) -> None:
    contexts = _contexts(block, mode)

    def recomputing(module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        make = None if contexts is None else functools.partial(contexts, module)
        return replay(compute, args, kwargs, inputs, make)

    wrap_forward(block, _ORIGINAL, recomputing)


def _contexts(block: nn.Module, mode: Mode) -> Callable[[nn.Module], Contexts] | None:
    """Return a function that makes the contexts of a call; None when a call needs none."""
    buffered = next(block.buffers(), None) is not None
    if mode == "full" and not buffered:
        return None

    def make(module: nn.Module) -> Contexts:
        kept = selective_contexts() if mode == "selective" else Contexts((), ())
        if not buffered:
            return kept
        unchanged = UnchangedBuffers(module)
        return Contexts((unchanged.noting, *kept.first), (unchanged.undoing, *kept.again))

    return make


def _refuse_compiled(name: str, block: nn.Module, mode: Mode) -> None:
    wrapped = hasattr(block, "_orig_mod")
    if block._compiled_call_impl is not None and not wrapped:
        raise UsageError(
            f"expected a block {name!r} that is not compiled in place, found block.compile(); put "
            "torch.compile(block) in its place in the model, which is recomputed as one whole"
        )
    if wrapped and mode == "selective":
        raise UsageError(
            f"expected an uncompiled block {name!r} for selective recompute, found a compiled one, "
            "whose operations cannot be told apart; use mode='full', or do not compile the block"
        )
