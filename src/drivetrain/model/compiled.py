"""Compiled blocks: ``torch.compile`` of the forward of each class of blocks, inside of all hooks.

Hooks of strategies bring parameters and send gradients around a block's forward, and recompute
stands around it: they stay outside of the graph, which sees whole parameters. The module is an
argument of the graph, so that all blocks of a class have one.
"""

import importlib
from pathlib import Path
from typing import Any
from weakref import WeakSet

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

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders of torch and of this package."""

SHARED = "_ranks_share_forward"
"""An attribute of modules in whose forward ranks exchange tensors, true where no graph may."""

WHOLE = "_stands_for_whole"
"""An attribute of classes of parameters whose memory is a part of what they show, for now."""


def compile_blocks(model: nn.Module, device: torch.device) -> None:
    """Let the blocks that a model repeats, or else the model, run compiled from the first call on.

    A deep copy of a block is compiled, too; a pickled one computes as its class says.

    Args:
        model: changed in place; ``restore_blocks`` undoes it. A block that the user compiled, or
            that has a forward of its own, stays as it is.
        device: where it will run.

    Raises:
        UsageError: there is no C++ compiler.
    """
    if BACKEND == "inductor" and device.type == "cpu":
        _check_compiler()
    around = _Compiled()
    for block in [block for _, block in repeated_blocks(model)] or [model]:
        own = "forward" in block.__dict__  # another one than its class's
        if not own and not any(map(compiles_inside, (model, *block.modules()))):
            wrap_forward(block, COMPILED_FORWARD, around)


def restore_blocks(model: nn.Module) -> None:
    """Give the blocks of a model the forward back that they had before ``compile_blocks``."""
    for module in model.modules():
        if COMPILED_FORWARD in module.__dict__:
            unwrap_forward(module, COMPILED_FORWARD)
            # Graphs belong to the class's code, and their number has a limit.
            torch._dynamo.reset_code(type(module).forward.__code__)  # type: ignore[attr-defined]


def _check_compiler() -> None:
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except RuntimeError as error:
        raise UsageError(
            f"compile: blocks: expected a C++ compiler, found none ({error}); install g++, name "
            "one in the variable CXX, or leave compile: none"
        ) from error


def _bring_values(block: nn.Module) -> bool:
    """Have a block's divided values, as where backward computes it again: then no hooks run.

    False: parameters stand for others, as where a block is called by itself.
    """
    for parameter in block.parameters():
        if hasattr(type(parameter), WHOLE):
            return False
        if is_guarded(parameter):
            parameter.new_empty(0)
    return True


class _Compiled:
    """Stands around the forward of a model's blocks, and compiles that of each class once."""

    def __init__(self) -> None:
        self._called: dict[Function, Function] = {}  # in the place of each class's forward
        self._in_pieces: set[Function] = set()
        self._given_up: set[Function] = set()
        # Blocks with a graph keep it when others give up: backward may compute them again.
        self._with_graph: WeakSet[nn.Module] = WeakSet()

    def __deepcopy__(self, memo: Any) -> "_Compiled":
        return self

    def __call__(
        self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords
    ) -> Any:
        """Return the block's outputs."""
        if torch.compiler.is_compiling():  # inside of what the script compiles
            return compute(*args, **kwargs)
        forward: Function = type(module).forward
        if forward in self._given_up and module not in self._with_graph:
            return compute(*args, **kwargs)
        if not _bring_values(module):
            return compute(*args, **kwargs)
        called = self._called.get(forward)
        if called is None:
            called = self._called[forward] = torch.compile(forward, backend=BACKEND, fullgraph=True)
        exc: Any = torch._dynamo.exc
        try:
            outputs = called(module, *args, **kwargs)
        except exc.BackendCompilerFailed as error:
            raise UsageError(
                f"compile: blocks: expected {BACKEND} to compile {type(module).__name__}, found "
                f"that it fails ({str(error).strip().partition(chr(10))[0]}); install what it "
                "needs, or leave compile: none"
            ) from error
        except (
            exc.Unsupported,
            exc.InternalTorchDynamoError,
            exc.FailOnRecompileLimitHit,
        ) as error:  # it cannot be one graph
            if forward in self._in_pieces:
                raise  # some may have run
            self._with_graph.discard(module)
            if forward not in self._given_up:
                self._give_up(module, error)
        else:
            self._with_graph.add(module)
            return outputs
        return self(module, compute, args, kwargs)

    def _give_up(self, module: nn.Module, error: Exception) -> None:
        """Let blocks that cannot be one graph run in pieces, or as they are, and say so."""
        forward: Function = type(module).forward
        name = f"compile: blocks: {type(module).__name__}"
        shared = [each for each in module.modules() if getattr(each, SHARED, False)]
        if shared and module not in shared:
            self._in_pieces.add(forward)
            self._called[forward] = torch.compile(forward, backend=BACKEND)
            logger.announce(
                f"{name} is compiled in pieces, around {len(shared)} modules that stay outside"
            )
            return
        self._given_up.add(forward)
        if shared:
            why = "ranks share its forward"
        elif isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
            why = "its calls need more graphs than torch._dynamo.config.recompile_limit"
            if type(module).__module__.startswith("transformers."):
                why += "; one is enough without a cache: model.config.use_cache = False"
        else:
            reason = str(error).strip().partition("\n")[0]
            why = f"torch.compile stops at {_place(error) or forward.__qualname__}: {reason}"
        logger.warning(f"{name} runs as it is written: {why}")


def _place(error: Exception) -> str:
    """Return file and line of the script, or of the model's package, where a graph breaks."""
    frames = getattr(error, "real_stack", None) or ()
    others = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f"{others[-1].filename}:{others[-1].lineno}" if others else ""
