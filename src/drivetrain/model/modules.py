"""The modules of a model: names outside of a run, another forward, the repeated blocks.

Another forward for a module, and hooks and methods that copies of a module do not inherit.

The repeated blocks of a model, such as transformer layers: found, conducted in a pass, compiled.

``torch.compile`` takes the forward of each class of blocks, inside of all hooks. Hooks of
strategies bring parameters and send gradients around a block's forward, and recompute stands around
it: they stay outside of the graph, which sees whole parameters. The module is an argument of the
graph, so that all blocks of a class have one.
"""

import functools
import importlib
import inspect
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MethodType
from typing import Any, Protocol, TypeAlias, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.model.guard import (
    STANDS_FOR,
    Arguments,
    Elsewhere,
    Function,
    Keywords,
    is_guarded,
)
from drivetrain.nested import convert_to_fp32

# --- the names of the training state outside of a run, as in the user's own model ---

_COMPILED = "_orig_mod."
"""The prefix that ``torch.compile`` puts before the names of a wrapped module."""


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefixes of ``torch.compile``."""
    return name.replace(_COMPILED, "")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the distinct parameters in registration order; tied ones under their first name.

    Those that other ranks hold are left out.
    """
    named = model.named_parameters()
    return {clean_name(name): p for name, p in named if not isinstance(p, Elsewhere)}


def held_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the distinct parameters but those that other ranks hold.

    Also those that a model leaves out of ``parameters()``, as one that is trained beside it.
    """
    yield from named_parameters(model).values()


def held_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the distinct buffers but those that other ranks hold."""
    named = model.named_buffers()
    return {clean_name(name): b for name, b in named if not hasattr(b, STANDS_FOR)}


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each distinct parameter and buffer, by the first name."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            kept = first.setdefault(id(tensor), clean_name(name))
            names.setdefault(kept, []).append(clean_name(name))
    return names


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the distinct buffers that a state dict would hold, but those of other ranks."""
    fleeting = {
        clean_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {name: each for name, each in held_buffers(model).items() if name not in fleeting}


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` has wrapped, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


# --- another forward for a module ---

_ORIGINAL = "_forward_before_prepare"
_NORM, _NARROW = "aten::rms_norm", "_forward_before_widening"


AroundForward: TypeAlias = Callable[[nn.Module, Function, Arguments, Keywords], Any]
"""Computes a module's outputs in place of its forward, which is the second argument."""


def wrap_forward(module: nn.Module, key: str, around: AroundForward) -> None:
    """Put another forward around a module's own; hooks of the module stay outside of it.

    A deep copy is wrapped too and computes with its own parameters; a pickled module computes as
    its class says.

    Args:
        module: changed in place; ``unwrap_forward`` undoes it. If it is wrapped under this key
            already, the older wrapping is taken off first.
        key: of the module's ``__dict__``, a key for each purpose; holds the forward from before.
        around: called instead of the forward, with the module itself or a copy of it.
    """
    unwrap_forward(module, key)
    before = module.__dict__.get("forward")

    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        own = module.__dict__[key]
        compute = functools.partial(type(module).forward, module) if own is None else own
        return around(module, compute, args, kwargs)

    functools.update_wrapper(forward, module.forward)
    forward.__name__ = "forward"  # pickle looks a method up on the class under this name
    forward.__signature__ = _with_module(module.forward)  # type: ignore[attr-defined]
    # In __dict__ directly: a compiled module hands attributes set on it to the module inside. A
    # method, since deepcopy binds methods, unlike functions, to the copy.
    module.__dict__[key] = before
    module.__dict__["forward"] = MethodType(forward, module)


def unwrap_forward(module: nn.Module, key: str) -> None:
    """Give a module back the forward it had before it was wrapped under a key, if it was."""
    if key not in module.__dict__:
        return
    before = module.__dict__.pop(key)
    if before is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = before


def is_wrapped(module: nn.Module, key: str) -> bool:
    """Return whether a module is wrapped under a key; a pickle has lost the function around."""
    own = getattr(module.__dict__.get("forward"), "__func__", None)
    return key in module.__dict__ and own is not type(module).forward


def _with_module(method: Callable[..., Any]) -> inspect.Signature:
    """Return a bound method's signature with the module before its arguments.

    It is called ``self`` there: a forward may have an argument of any other name.
    """
    module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(method)
    return signature.replace(parameters=[module, *signature.parameters.values()])


def compute_in(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the model's forward inside a context; floating point outputs become fp32.

    A deep copy of the model computes in the same context, with its own parameters; a pickled model
    computes as its class says. ``restore_forward`` undoes the change.
    """
    if is_wrapped(model, _ORIGINAL):
        return

    def in_context(module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        with context():
            outputs = compute(*args, **kwargs)
        return convert_to_fp32(outputs)

    wrap_forward(model, _ORIGINAL, in_context)


def widen_norms(model: nn.Module, device: torch.device) -> None:
    """Let each ``RMSNorm`` meet its input in the dtype of a wider weight, and return the input's.

    The numbers are the same; but for two dtypes torch leaves its fused kernel, for some twenty
    others, unless autocast casts the input, as for CUDA from torch 2.12 on. ``restore_forward``
    undoes the change.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(_NORM, f"Autocast{device.type.upper()}"):
        return

    def widened(module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        (x,) = (*args, *kwargs.values())
        wide = cast(nn.RMSNorm, module).weight.dtype
        wider = wide.itemsize > x.dtype.itemsize
        return compute(x.to(wide)).to(x.dtype) if wider else compute(x)

    for module in model.modules():
        if type(module) is nn.RMSNorm and module.elementwise_affine:
            wrap_forward(module, _NARROW, widened)


def restore_forward(model: nn.Module) -> None:
    """Give a model back the forward it had before ``compute_in`` and ``widen_norms``."""
    unwrap_forward(model, _ORIGINAL)
    for module in model.modules():
        unwrap_forward(module, _NARROW)


class UninheritedHook:
    """A hook on a module, of any signature, that copies and pickles of the module do not inherit.

    Copies for moving averages and pickles are ordinary models: they must neither communicate nor
    hold on to the strategy.

    Args:
        action: called with the hook's arguments; None for nothing, as in a copy.
    """

    def __init__(self, action: Callable[..., Any] | None) -> None:
        self._action = action

    def __call__(self, *arguments: Any) -> Any:
        """Act, and return what the action returns: a hook may replace inputs or results."""
        return None if self._action is None else self._action(*arguments)

    def __reduce__(self) -> tuple[type["UninheritedHook"], tuple[None]]:
        return UninheritedHook, (None,)


class UninheritedContext:
    """The context method of one module; copies and pickles of the module have one without effect.

    Args:
        enter: makes the context.
    """

    def __init__(self, enter: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._enter = enter

    def __call__(self) -> AbstractContextManager[None]:
        """Return a new context."""
        return self._enter()

    def __reduce__(self) -> tuple[type["UninheritedContext"], tuple[()]]:
        return UninheritedContext, ()


class UninheritedMethod:
    """A method of one object in the place of its class's; copies and pickles have their class's.

    Args:
        owner: a module or an optimizer.
        name: of the method.
        action: called with the method's arguments; None for the class's method, as in a copy.
    """

    def __init__(
        self, owner: nn.Module | Optimizer, name: str, action: Callable[..., Any] | None = None
    ) -> None:
        self._owner, self._name = owner, name
        self._action = action
        self._before: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        action = self._action or MethodType(getattr(type(self._owner), self._name), self._owner)
        return action(*args, **kwargs)

    def put(self) -> None:
        """Let the owner have it, until ``take_off``."""
        self._before = self._owner.__dict__.get(self._name)
        self._owner.__dict__[self._name] = self

    def take_off(self) -> None:
        """Let the owner have the method from before, unless it has had another one since."""
        if self._owner.__dict__.get(self._name) is not self:
            return
        del self._owner.__dict__[self._name]
        if self._before is not None:
            self._owner.__dict__[self._name] = self._before

    def __reduce__(self) -> tuple[type["UninheritedMethod"], tuple[nn.Module | Optimizer, str]]:
        return UninheritedMethod, (self._owner, self._name)


# --- the forward hooks that a script, or its model, has put on a module ---


def hooks_of_script(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return a module's forward hooks by their numbers, without those of strategies and of looks.

    The latter act on tensors, or note them, wherever the module is called.
    """
    return {
        number: hook
        for number, hook in module._forward_hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("drivetrain")
    }


COMPILED_FORWARD = "_forward_before_compile"
"""Where a block that runs compiled, between its hooks, keeps the forward of before."""


def compiles_inside(module: nn.Module) -> bool:
    """Return whether torch compiles what a module calls: hooks inside would change its graphs."""
    wrapped = uncompiled(module) is not module or COMPILED_FORWARD in module.__dict__
    return wrapped or is_compiled_call(module)


def is_compiled_call(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` compiled the calls of a module, hooks and forward."""
    return module.__dict__.get("_compiled_call_impl") is not None


# --- the repeated blocks of a model, such as transformer layers ---

_LISTS = nn.ModuleList | nn.Sequential
_NEVER_CALLED = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict

_BEFORE_HOOKS = "_forward_before_hooks"

COMPILED_CALL = "_compiled_call_impl"
"""Where ``module.compile()`` keeps the compiled call of a module, hooks and forward in one."""

NamedModule: TypeAlias = tuple[str, nn.Module]


def repeated_blocks(model: nn.Module) -> list[NamedModule]:
    """Return the blocks that a model repeats, under the names of the user's uncompiled model.

    A block stands in a ``ModuleList`` or ``Sequential`` together with another of its class, holds
    parameters, and is more than one layer of ``torch.nn``. The outermost lists count: blocks inside
    of blocks are not looked for. A list inside a list is a block only if it holds no blocks.

    Returns:
        (name, module) of each block in the order of registration; a module that stands in several
        places comes once, under its first name. Empty when nothing repeats.
    """
    distinct: dict[int, NamedModule] = {}
    for name, block in _search(model, ""):
        distinct.setdefault(id(block), (clean_name(name), block))
    return list(distinct.values())


def model_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a model in their order, by the names of its modules.

    These are the repeated blocks, and the largest modules beside them that hold parameters. Where
    nothing repeats, they are the model's children; a model without children is one part.
    """
    plain = uncompiled(model)
    blocks = {id(block) for _, block in repeated_blocks(model)}
    found: dict[int, NamedModule] = {}
    for name, part in _parts(plain, "", blocks):
        found.setdefault(id(part), (clean_name(name), part))
    return dict(found.values())


def _parts(module: nn.Module, prefix: str, blocks: set[int]) -> Iterator[NamedModule]:
    for name, child in module.named_children():
        opened = any(id(inner) in blocks for inner in child.modules())
        opened = opened or isinstance(child, _NEVER_CALLED)
        if id(child) not in blocks and opened:
            yield from _parts(child, f"{prefix}{name}.", blocks)
        elif next(iter(child.parameters()), None) is not None:
            yield prefix + name, child
    if not prefix and next(module.children(), None) is None:
        yield type(module).__name__, module


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
    return type(uncompiled(module))


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _NEVER_CALLED) or next(iter(module.parameters()), None) is None:
        return False
    whole = next(module.children(), None) is not None
    return whole or not type(module).__module__.startswith("torch.nn.")


class BlockConductor(Protocol):
    """Decides about the calls of blocks during one pass."""

    def call(self, index: int, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Return the block's result; ``compute`` is the block's own forward."""


class BlockHooks:
    """Takes the place of the blocks' ``forward``, in their own ``__dict__``, until ``close``.

    Outside of a pass, as when activations are computed again in backward, blocks are as they were.
    The conductor of a block that ``block.compile()`` compiled stands around the compiled call:
    compiled code cannot hold decisions that differ from pass to pass.

    Attributes:
        blocks: the modules, in order; none after ``close``.
    """

    def __init__(self, blocks: Sequence[NamedModule]) -> None:
        self._conductor: BlockConductor | None = None
        self.blocks = [block for _, block in blocks]
        self._compiled: list[tuple[nn.Module, Function]] = []
        for index, block in enumerate(self.blocks):
            self._stand_before(index, block)

    @contextmanager
    def conducted(self, conductor: BlockConductor) -> Iterator[None]:
        """Context of a pass in which a conductor decides; the conductor of an outer pass waits."""
        outer, self._conductor = self._conductor, conductor
        try:
            yield
        finally:
            self._conductor = outer

    def close(self) -> None:
        """Give the blocks their forward back."""
        for block in self.blocks:
            unwrap_forward(block, _BEFORE_HOOKS)
        for block, compiled in self._compiled:
            block.__dict__[COMPILED_CALL] = compiled
        self.blocks.clear()
        self._compiled.clear()

    def _stand_before(self, index: int, block: nn.Module) -> None:
        def around(module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
            if self._conductor is None or module is not block:  # a copy computes as it is
                return compute(*args, **kwargs)
            return self._conductor.call(index, compute, args, kwargs)

        compiled = block.__dict__.get(COMPILED_CALL)
        if compiled is None:
            wrap_forward(block, _BEFORE_HOOKS, around)
        else:  # copies and pickles of the block do not inherit a compiled call
            self._compiled.append((block, compiled))
            block.__dict__[COMPILED_CALL] = lambda *args, **kwargs: around(
                block, compiled, args, kwargs
            )


# --- the sizes of modules, for tables ---


@dataclass(eq=False)
class ModelSizes:
    """The elements of the parameters inside each module of a run's models, as the script made them.

    A shared parameter counts once in each module.
    """

    _inside: defaultdict[str, dict[int, int]] = field(default_factory=partial(defaultdict, dict))
    _models: int = 0

    def add(self, model: nn.Module) -> None:
        """Note a model that is about to be prepared."""
        name = name_of(model, self._models)
        self._models += 1
        for parameter, tensor in model.named_parameters(remove_duplicate=False):
            for around in names_around(f"{name}.{clean_name(parameter)}".rpartition(".")[0]):
                self._inside[around][id(tensor)] = tensor.numel()

    def by_module(self) -> dict[str, int]:
        """Return the elements by the name of the module."""
        return {name: sum(found.values()) for name, found in self._inside.items()}


def name_of(model: nn.Module, number: int) -> str:
    """Return the name of a model in tables: its class, and a number where it is not the first."""
    name = type(uncompiled(model)).__name__
    return f"{name}-{number}" if number else name


def names_around(name: str) -> list[str]:
    """Return a module's name, and the names of all modules around it."""
    return list(accumulate(name.split("."), "{}.{}".format))


# --- compiled blocks ---

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


_Way: TypeAlias = tuple[Any, int]
"""A node of autograd, and the number of its output."""


def _exactly(graph: Any, inputs: Sequence[Any]) -> Function:
    """Return a graph compiled, whose backward is that of the code it was made of.

    A compiled backward gives zeros where eager gives None: to what the loss reaches through none
    of the outputs it takes. It also computes values again of inputs that the graph wrote to since.
    """
    compiler = importlib.import_module("torch._dynamo.backends.registry").lookup_backend(BACKEND)
    placed, end = graph.graph.find_nodes(op="placeholder"), graph.graph.output_node()
    values = [node.meta.get("example_value") for node in placed]
    returned = [getattr(each, "meta", {}).get("example_value") for each in end.args[0]]
    if not any(map(_has_graph, returned)):
        return cast(Function, compiler(graph, inputs))
    known = {
        _way(value): i
        for i, value in enumerate(values)
        if _has_graph(value) and (value.is_leaf or not value._version)
    }
    unsure = {i for i, value in enumerate(values) if _has_graph(value)} - set(known.values())
    reached = [{known[way] for way in _ways_back(each, known)} | unsure for each in returned]
    whole = [each for each, value in zip(reached, returned, strict=True) if _has_graph(value)]
    written = [i for i, value in enumerate(values) if _is_written(value, values)]
    same = [(at, i) for at, each in enumerate(returned) for i in written if each is values[i]]
    for i in written:  # the graph gets a copy, leaves it as it is, and returns what it would be
        with graph.graph.inserting_after(placed[-1]):
            copy = graph.graph.call_method("clone", (placed[i],))
        placed[i].replace_all_uses_with(copy, partial(operator.is_not, copy))
        end.args = ((*end.args[0], copy),)
    graph.recompile()
    compiled: Function = compiler(graph, inputs)

    def call(*args: Any) -> Sequence[Any]:
        given = [each.clone() if i in written else each for i, each in enumerate(args)]
        starts = {_way(each): i for i, each in enumerate(given) if _has_graph(each)}
        outputs = list(compiled(*given))
        for i in reversed(written):
            with torch.no_grad():
                args[i].copy_(outputs.pop())
        _leave_out(outputs, reached, starts)
        for at, i in same:
            outputs[at] = args[i]
        return outputs

    return call if written or any(each != whole[0] for each in whole) else compiled


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_written(value: Any, values: Sequence[Any]) -> bool:
    """Return whether a graph writes to an input, which has its memory alone."""
    if not isinstance(value, Tensor) or value.is_inference() or not value.is_leaf:
        return False
    memory = value.untyped_storage()._cdata
    tensors = (each for each in values if isinstance(each, Tensor) and each is not value)
    return value._version > 0 and all(each.untyped_storage()._cdata != memory for each in tensors)


def _way(tensor: Tensor) -> _Way:
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _is_compiled(way: _Way) -> bool:
    return type(way[0]).__name__ == "CompiledFunctionBackward"


def _ways_back(value: Any, starts: Container[_Way]) -> set[_Way]:
    """Return the starts, and the compiled graphs, that a backward from a value gets to first."""
    ways, seen, found = [_way(value)] if _has_graph(value) else [], set(), set()
    while ways:
        way = ways.pop()
        if way in starts or _is_compiled(way):
            found.add(way)
        elif way[0] is not None and way not in seen:
            seen.add(way)
            ways += way[0].next_functions
    return found


def _leave_out(
    outputs: Sequence[Any], reached: Sequence[set[int]], starts: Mapping[_Way, int]
) -> None:
    """Let a compiled backward give None to inputs that no output with a gradient depends on."""
    by_output: defaultdict[int, set[int]] = defaultdict(set)
    node = None
    for output, inputs in zip(outputs, reached, strict=True):
        for way in filter(_is_compiled, _ways_back(output, starts) - starts.keys()):
            node = way[0]
            by_output[way[1]] |= inputs
    if node is None:
        return
    everything = set(starts.values())
    places = [starts.get(way) for way in node.next_functions]

    def mask(gradients: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
        numbers = [number for number, gradient in enumerate(given) if gradient is not None]
        wanted = set().union(*(by_output.get(number, everything) for number in numbers))
        pairs = zip(places, gradients, strict=True)
        return tuple(None if at is not None and at not in wanted else each for at, each in pairs)

    node.register_hook(mask)


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
            called = self._called[forward] = torch.compile(
                forward, backend=_exactly, fullgraph=True
            )
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
            self._called[forward] = torch.compile(forward, backend=_exactly)
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
