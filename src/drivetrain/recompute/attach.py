"""Puts a recomputing forward into a module's own ``__dict__``, and takes it out again.

Only ``forward`` is replaced, so hooks on the block, as strategies set them, run once per forward
and stay outside of what is recomputed.
"""

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from drivetrain.errors import UsageError
from drivetrain.parts.blocks import NamedModule
from drivetrain.recompute.buffers import Unchanged
from drivetrain.recompute.inputs import Inputs
from drivetrain.recompute.replay import Contexts, replay
from drivetrain.recompute.selective import selective_contexts

Mode: TypeAlias = Literal["full", "selective"]

_ORIGINAL = "_forward_before_recompute"


def attach(blocks: Iterable[NamedModule], mode: Mode, inputs: Inputs | None = None) -> None:
    """Let blocks be recomputed in backward; one that was attached before is attached anew.

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
        _wrap(block, mode, inputs or Inputs())


def restore(model: nn.Module) -> None:
    """Give every block of a model back the forward it had before ``attach``."""
    for module in model.modules():
        _unwrap(module)


def is_attached(model: nn.Module) -> bool:
    """Whether a block of a model is recomputed."""
    return any(_is_wrapped(module) for module in model.modules())


def _wrap(block: nn.Module, mode: Mode, inputs: Inputs) -> None:
    _unwrap(block)
    before = block.__dict__.get("forward")
    contexts = _contexts(block, mode)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = module.__dict__[_ORIGINAL]
        compute = MethodType(type(module).forward, module) if own is None else own
        if not module.training or not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        make = None if contexts is None else functools.partial(contexts, module)
        return replay(compute, args, kwargs, inputs, make)

    # A method under the name forward: deepcopy binds methods to the copy, and pickle looks the name
    # up on the class.
    functools.update_wrapper(forward, block.forward)
    forward.__name__ = "forward"
    block.__dict__[_ORIGINAL] = before
    block.__dict__["forward"] = MethodType(forward, block)


def _is_wrapped(module: nn.Module) -> bool:
    """Whether a module recomputes; one out of a pickle has lost the function that did."""
    own = getattr(module.__dict__.get("forward"), "__func__", None)
    return _ORIGINAL in module.__dict__ and own is not type(module).forward


def _unwrap(module: nn.Module) -> None:
    if _ORIGINAL not in module.__dict__:
        return
    original = module.__dict__.pop(_ORIGINAL)
    if original is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = original


def _contexts(block: nn.Module, mode: Mode) -> Callable[[nn.Module], Contexts] | None:
    """Return what makes the contexts of one call; None when a call needs none."""
    buffered = next(block.buffers(), None) is not None
    if mode == "full" and not buffered:
        return None

    def make(module: nn.Module) -> Contexts:
        first, again = selective_contexts() if mode == "selective" else ((), ())
        if not buffered:
            return Contexts(first, again)
        unchanged = Unchanged(module)
        return Contexts((unchanged.noting, *first), (unchanged.undoing, *again))

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
