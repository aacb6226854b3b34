"""Compiled blocks: ``torch.compile`` of the forward of each class of blocks, inside of all hooks.

Hooks of strategies bring parameters and send gradients around a block's forward, and recompute
stands around it: they stay outside of the graph, which sees whole parameters. The module is an
argument of the graph, so that all blocks of a class have one.
"""

import importlib
from typing import Any

import torch
from torch import nn

from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.model.guard import Arguments, Function, Keywords, is_guarded
from drivetrain.model.modules import (
    COMPILED_FORWARD,
    compiles_inside,
    repeated_blocks,
    unwrap_forward,
    wrap_forward,
)

logger = get_logger(__name__)

BACKEND = "inductor"

SHARED = "_ranks_share_forward"
"""An attribute of modules in whose forward ranks exchange tensors: they stay outside of graphs."""


def compile_blocks(model: nn.Module) -> None:
    """Let the blocks that a model repeats, or else the model, run compiled from the first call on.

    A deep copy of a block is compiled, too; a pickled one computes as its class says.

    Args:
        model: changed in place; ``restore_blocks`` undoes it. What the user compiled stays as it
            is.

    Raises:
        UsageError: there is no C++ compiler.
    """
    _check_compiler(model)
    around = _Compiled()
    for block in [block for _, block in repeated_blocks(model)] or [model]:
        if not any(map(compiles_inside, (model, *block.modules()))):
            wrap_forward(block, COMPILED_FORWARD, around)


def restore_blocks(model: nn.Module) -> None:
    """Give the blocks of a model the forward back that they had before ``compile_blocks``."""
    for module in model.modules():
        unwrap_forward(module, COMPILED_FORWARD)


def _check_compiler(model: nn.Module) -> None:
    if BACKEND != "inductor" or any(p.is_cuda for p in model.parameters()):
        return  # Triton has its own for GPUs
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except RuntimeError as error:
        raise UsageError(
            f"compile: blocks: expected a C++ compiler, found none ({error}); install g++, name "
            "one in the variable CXX, or leave compile: none"
        ) from error


class _Compiled:
    """Stands around the forward of a model's blocks, and compiles that of each class once."""

    def __init__(self) -> None:
        self._called: dict[Function, Function] = {}  # in the place of each class's forward

    def __call__(
        self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords
    ) -> Any:
        """Return the block's outputs."""
        forward: Function = type(module).forward
        called = self._called.get(forward)
        if called is None:
            called = self._called[forward] = torch.compile(forward, backend=BACKEND, fullgraph=True)
        if called is forward:
            return compute(*args, **kwargs)
        for parameter in module.parameters():
            if is_guarded(parameter):  # as where backward computes a block again: no hooks run
                parameter.new_empty(0)
        try:
            return called(module, *args, **kwargs)
        except _errors() as error:  # while it makes the graph: nothing has run
            self._called[forward] = _instead(module, error)
        return self(module, compute, args, kwargs)


def _instead(module: nn.Module, error: Exception) -> Function:
    """Return what runs where a block cannot be one graph, and say so."""
    forward: Function = type(module).forward
    name = type(module).__name__
    shared = [each for each in module.modules() if getattr(each, SHARED, False)]
    if shared and module not in shared:
        logger.announce(
            f"compile: blocks: {name} is compiled in pieces, around {len(shared)} modules whose "
            "forward ranks share"
        )
        return torch.compile(forward, backend=BACKEND)
    if shared:
        reason = "ranks share its forward"
    else:
        reason = f"torch.compile stops at {_place(error) or forward.__qualname__}: "
        reason += str(error).strip().partition("\n")[0]
    logger.warning(f"compile: blocks: {name} runs as it is written: {reason}")
    return forward


def _errors() -> tuple[type[Exception], ...]:
    """Return what torch raises where it cannot make one graph."""
    exc: Any = torch._dynamo.exc
    return exc.Unsupported, exc.InternalTorchDynamoError, exc.FailOnRecompileLimitHit


def _place(error: Exception) -> str:
    """Return file and line of the script, or of the model's package, where a graph breaks."""
    frames = getattr(error, "real_stack", None) or ()
    own = [f"{frame.filename}:{frame.lineno}" for frame in frames if not _is_inside(frame.filename)]
    return own[-1] if own else ""


def _is_inside(path: str) -> bool:
    return "/torch/" in path or "/drivetrain" in path
