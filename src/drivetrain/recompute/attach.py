"""Puts a recomputing forward into a module's own ``__dict__``, and takes it out again.

Only ``forward`` is replaced, so hooks on the block, as strategies set them, run once per forward
and stay outside of what is recomputed.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from drivetrain.errors import UsageError
from drivetrain.parts.blocks import NamedModule
from drivetrain.parts.wrapping import is_wrapped, unwrap_forward, wrap_forward
from drivetrain.recompute.inputs import KeptInputs
from drivetrain.recompute.replay import Contexts, Unchanged, replay
from drivetrain.recompute.selective import selective_contexts

Mode: TypeAlias = Literal["full", "selective"]

_ORIGINAL = "_forward_before_recompute"


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

    def recomputing(
        module: nn.Module,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
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
