"""The trace of a model: one forward without values, with every operation, module call and tensor.

Tensors are known by numbers, in the order in which the forward met them. An operation names the
numbers of its arguments and results; so the operations are a graph of dependencies.
"""

import copy
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.model.guard import BLANK, LOOKUPS, Arguments, Function, Keywords, targets
from drivetrain.model.modules import BlockHooks, NamedModule, hooks_of_script, repeated_blocks
from drivetrain.model.untouched import Substitutes, without_values
from drivetrain.model.valueless import (
    SEED,
    Facts,
    ValuelessTensor,
    WorkTally,
    WriteRefusedError,
    facts_of,
    filled,
    random_like,
)
from drivetrain.nested import tensors_in
from drivetrain.runtime import rng

# --- the record ---


class TracedTensor(NamedTuple):
    """One tensor of a forward.

    Attributes:
        facts: shape, strides, dtype, device.
        requires_grad: whether a gradient would go back for it.
        known: whether it has values: it follows from the inputs and buffers alone.
    """

    facts: Facts
    requires_grad: bool
    known: bool


class TensorRef(NamedTuple):
    """Stands for a tensor among the arguments of an operation or a block."""

    number: int


class View(NamedTuple):
    """Says that a tensor shows the memory of another.

    Attributes:
        made: number of the view.
        base: number of the argument that shares its memory.
        offset: by how many elements the view begins later.
    """

    made: int
    base: int
    offset: int


@dataclass(frozen=True, slots=True)
class ModelOperation:
    """One function of torch that the model's code called.

    Attributes:
        function: the function.
        args: its arguments, with a ``TensorRef`` for every tensor.
        kwargs: its arguments by name, likewise.
        inputs: numbers of the tensors among them, in order.
        outputs: numbers of the returned tensors; an argument may be among them.
        changed: numbers of the arguments written into.
        views: the outputs that show an argument's memory.
        module: name of the innermost module that ran.
        block: index of the block's call around the operation; None outside of blocks.
        known: whether the results have values: all arguments have some.
        work: floating point operations of its matrix products, convolutions and attentions.
        read: bytes of its arguments; 0 if it only makes views.
        written: bytes of the tensors made or changed; 0 likewise.
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: Keywords
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    changed: tuple[int, ...]
    views: tuple[View, ...]
    module: str
    block: int | None
    known: bool
    work: int
    read: int
    written: int

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__name__", self.function))


class ModuleCall(NamedTuple):
    """One call of a module inside of the model.

    Attributes:
        name: of the module.
        operations: indices of the operations in it.
        inputs: numbers of the tensors among its arguments.
        outputs: numbers of the returned tensors.
        hooked: whether forward hooks of the script see the result.
    """

    name: str
    operations: range
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    hooked: bool


class ReturnedLeaf(NamedTuple):
    """One leaf of a block's result.

    Attributes:
        number: of the tensor; None for another object.
        handed: number of the tensor that the code after the block got in its place.
        argument: the place among the leaves of the block's arguments; None for a new object.
        value: the object; None for a tensor.
        requires_grad: of the tensor.
    """

    number: int | None
    handed: int | None
    argument: int | None
    value: Any
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a repeated block.

    Attributes:
        name: of the block, as in the user's uncompiled model.
        caller: name of the block around it; None for none.
        operations: indices of the operations in it.
        names: readable names of the leaves of its arguments, such as ``2`` or ``mask[0]``.
        given: numbers of those leaves; None for other objects than tensors.
        args: copies of its arguments, with a ``TensorRef`` for a tensor without values.
        kwargs: its arguments by name, likewise.
        tree: the structure of the result.
        returned: the leaves of the result.
    """

    name: str
    caller: str | None
    operations: range
    names: tuple[str, ...]
    given: tuple[int | None, ...]
    args: tuple[Any, ...]
    kwargs: Keywords
    tree: TreeSpec
    returned: tuple[ReturnedLeaf, ...]


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """The record of one forward of a model.

    Attributes:
        tensors: the facts of each tensor, by its number.
        parameters: numbers of the distinct parameters, by their first name.
        aliases: all names of each parameter, by its first name.
        buffers: numbers of the buffers by name.
        operations: in order.
        modules: the calls of modules, in the order in which they ended.
        candidates: names of the repeated blocks, in the order of registration.
        blocks: the calls of repeated blocks, in the order in which they began.
        output: names of the leaves of the model's output, and numbers of the tensors among them.
    """

    tensors: Sequence[TracedTensor]
    parameters: Mapping[str, int]
    aliases: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, int]
    operations: Sequence[ModelOperation]
    modules: Sequence[ModuleCall]
    candidates: tuple[str, ...]
    blocks: Sequence[BlockCall]
    output: Sequence[tuple[str, int | None]]

    @property
    def work(self) -> int:
        """Floating point operations of the forward."""
        return sum(operation.work for operation in self.operations)

    def inside(self, call: BlockCall | ModuleCall) -> Sequence[ModelOperation]:
        """Return the operations of a call."""
        return self.operations[call.operations.start : call.operations.stop]

    def first_calls(self) -> dict[str, BlockCall]:
        """Return the first call of each block, in order, by the block's name."""
        calls: dict[str, BlockCall] = {}
        for call in self.blocks:
            calls.setdefault(call.name, call)
        return calls

    def example(
        self, call: BlockCall, fill: Callable[[TracedTensor], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with which a block can be called by itself.

        ``fill`` makes the tensors in place of those without values.
        """
        args, kwargs = tree_map_only(
            TensorRef,
            lambda ref: fill(self.tensors[ref.number]),
            (call.args, dict(call.kwargs)),
            is_leaf=_is_reference,
        )
        return args, kwargs


def named_leaves(args: Arguments, kwargs: Keywords) -> list[tuple[str, Any]]:
    """Return the leaves of a call's arguments with readable names, such as ``2`` or ``mask[0]``."""
    flat, _ = tree_flatten_with_path((tuple(args), dict(kwargs)))
    return [(_readable(keystr(path[1:])), leaf) for path, leaf in flat]


def _readable(path: str) -> str:
    first, _, rest = path.partition("]")
    return first.strip("['") + rest


# --- the one run that writes it down ---


class TracedTensors:
    """Numbers of tensors, in the order in which a forward meets them."""

    def __init__(self) -> None:
        # torch's mapping by identity has no types.
        by_identity: Any = WeakIdKeyDictionary
        self._numbers: MutableMapping[Tensor, int] = by_identity()
        self.tensors: list[TracedTensor] = []

    def equate(self, tensor: Tensor, number: int) -> None:
        """Let a tensor that stands for another one have its number."""
        self._numbers[tensor] = number

    def returned(self, leaf: Any, handed: Any, argument: int | None) -> ReturnedLeaf:
        """Return the record of a leaf of a block's result."""
        is_tensor = isinstance(leaf, Tensor)
        return ReturnedLeaf(
            self.number_of(leaf),
            self.number_of(handed),
            argument,
            None if is_tensor else leaf,
            is_tensor and leaf.requires_grad,
        )

    def number_of(self, leaf: Any) -> int | None:
        """Return the number of a tensor; None for another object."""
        return self.number(leaf) if isinstance(leaf, Tensor) else None

    def referring(self, value: Any) -> Any:
        """Return an argument with references in place of tensors."""
        if isinstance(value, Tensor):
            return TensorRef(self.number(value))
        if type(value) in (list, tuple):
            return type(value)(self.referring(item) for item in value)
        if type(value) is dict:
            return {key: self.referring(item) for key, item in value.items()}
        return value

    def number(self, tensor: Tensor, known: bool = True) -> int:
        """Return the number of a tensor; a new one gets the next, with values if they are known."""
        number = self._numbers.get(tensor)
        if number is None:
            number = self._numbers[tensor] = len(self.tensors)
            known = known and not isinstance(tensor, ValuelessTensor)
            with torch._C.DisableTorchFunction():
                seen = TracedTensor(_facts(tensor), tensor.requires_grad, known)
            self.tensors.append(seen)
        return number


def _facts(tensor: Tensor) -> Facts:
    """Return the facts of any tensor; no shape counts of ragged and sparse tensors."""
    if isinstance(tensor, ValuelessTensor):
        return tensor.facts
    if tensor.layout is not torch.strided or tensor.is_nested:
        return Facts((), (), tensor.dtype, tensor.device)
    return facts_of(tensor)


# --- the tracer ---


def trace_model(  # noqa: PLR0913 - keyword-only, each for one caller
    model: nn.Module,
    args: Arguments,
    kwargs: Keywords,
    *,
    blocks: Sequence[NamedModule] | None = None,
    kind: type[ValuelessTensor] = ValuelessTensor,
    isolated: bool = False,
    training: bool | None = None,
    until: Collection[str] = (),
) -> ModelTrace:
    """Run a model's forward once without values; it is not changed, and nothing is computed.

    Parameters have no values, and whatever follows from them has none. Operations on inputs and
    buffers alone are computed, so that masks and positions are known; a buffer that the forward
    overwrites by what follows from parameters has no values either.

    Args:
        model: the user's, also on the meta device.
        args: example inputs.
        kwargs: example inputs by name.
        blocks: the modules that count as blocks; None for the repeated ones.
        kind: class of the tensors without values, which words the errors.
        isolated: whether code outside of a block, too, gets tensors without values for all that the
            block made, as when the block runs elsewhere.
        training: mode of the forward; None for the model's own.
        until: names of blocks; after a call of each the forward ends, without any output.

    Raises:
        ValuesNeededError: the forward depends on values of hidden states.
    """
    overwritten: set[str] = set()
    valued: dict[Hashable, Exception] = {}
    while True:
        with without_values(model, kind, overwritten) as substitutes:
            if training is not None:
                model.train(training)
            try:
                found = repeated_blocks(model) if blocks is None else blocks
                tracer = _Tracer(found, substitutes, kind, isolated, valued, until)
                return tracer.run(model, args, kwargs)
            except _NeedsValues:
                continue  # from the start: hooks have collected tensors of the failed call
            except WriteRefusedError as error:
                written = substitutes.buffers_at(error.target)
                if isolated or not written:
                    raise
                overwritten |= written  # as of spectral normalisation: they follow from parameters


class _Running(NamedTuple):
    """A module whose forward runs, and the index of its first operation."""

    name: str
    start: int


class _NeedsValues(BaseException):
    """A block has failed without values: nothing for the model's own code to catch."""


class _Enough(BaseException):
    """All blocks have been called whose calls were asked for."""


class _Tracer(TorchFunctionMode):
    """Sees every function of torch and every call of a module in one forward.

    ``kind``, ``isolated`` and ``until`` are those of ``trace_model``. Kinds of blocks that fail
    without values are added, with the first error, to those that get random ones.
    """

    def __init__(
        self,
        blocks: Sequence[NamedModule],
        substitutes: Substitutes,
        kind: type[ValuelessTensor],
        isolated: bool,
        needing_values: dict[Hashable, Exception],
        until: Collection[str],
    ) -> None:
        super().__init__()
        self.candidates = blocks
        self._substitutes = substitutes
        self._kind, self._isolated = kind, isolated
        self._needing_values = needing_values
        self._awaited = {*until}
        self._seen = TracedTensors()
        self._operations: list[ModelOperation] = []
        self._modules: list[ModuleCall] = []
        self._running = [_Running("", 0)]
        self._blocks: list[BlockCall | None] = []  # None while a call runs
        self._open: list[tuple[int, str]] = []
        self._valued = False  # whether a block runs with values
        self._parameters = {
            name: self._seen.number(p) for name, p in substitutes.parameters.items()
        }
        self._buffers = {name: self._seen.number(b) for name, b in substitutes.buffers.items()}

    def run(self, model: nn.Module, args: Arguments, kwargs: Keywords) -> ModelTrace:
        """Run a model's forward and return the record of it."""
        device = self._substitutes.device
        given, named = tree_map_only(
            Tensor, lambda tensor: tensor.to(device), (tuple(args), dict(kwargs))
        )
        forward, output = model.forward, None
        with (
            suppress(_Enough),
            self._watching(model),
            BlockHooks(self.candidates).conducted(self),
            self,
            torch.enable_grad(),
        ):
            output = forward(*given, **named)
        return ModelTrace(
            self._seen.tensors,
            self._parameters,
            self._substitutes.aliases,
            self._buffers,
            self._operations,
            self._modules,
            tuple(name for name, _ in self.candidates),
            [block for block in self._blocks if block is not None],
            [(name, self._seen.number_of(leaf)) for name, leaf in named_leaves((output,), {})],
        )

    def __torch_function__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch and write its arguments and results down."""
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        if any(isinstance(tensor, ValuelessTensor) for tensor in given):
            result, work = func(*args, **kwargs), 0
        else:
            with WorkTally() as tally:
                result = func(*args, **kwargs)
            work = tally.work
        if self._isolated and self._open and not self._valued and func in BLANK:
            if not isinstance(result, ValuelessTensor):
                result = self._kind.of(result)  # the block will write into it
            given = []
        made = list(tensors_in(result))
        if made or (result is None and given):
            self._note(func, args, kwargs, given, made, work)
        return result

    def _note(
        self,
        func: Any,
        args: Arguments,
        kwargs: Keywords,
        given: Sequence[Tensor],
        made: Sequence[Tensor],
        work: int,
    ) -> None:
        inputs = tuple(self._seen.number(tensor) for tensor in given)
        new = [t for t in made if not any(t is tensor for tensor in given)]
        known = not self._valued and all(self._seen.tensors[number].known for number in inputs)
        outputs = tuple(self._seen.number(tensor, known) for tensor in made)
        written = targets(getattr(func, "__name__", ""), args, kwargs)
        changed = tuple(self._seen.number(target) for target in tensors_in(list(written)))
        shown = [(t, _shown(t, given)) for t in new]
        views = tuple(
            View(self._seen.number(t), inputs[place], offset)
            for t, (place, offset) in shown
            if place is not None
        )
        work += sum(tensor.work for tensor in new if isinstance(tensor, ValuelessTensor))
        fresh = {*outputs} - {*inputs} - {view.made for view in views}
        read, wrote = self._traffic(func, inputs, fresh | {*changed})
        self._operations.append(
            ModelOperation(
                func,
                tuple(self._seen.referring(arg) for arg in args) if given else (),
                {key: self._seen.referring(value) for key, value in kwargs.items()}
                if given
                else {},
                inputs,
                outputs,
                changed,
                views,
                self._running[-1].name,
                self._open[-1][0] if self._open else None,
                all(self._seen.tensors[number].known for number in (*inputs, *outputs)),
                work,
                read,
                wrote,
            )
        )

    def _traffic(self, func: Any, inputs: Sequence[int], written: set[int]) -> tuple[int, int]:
        """Return the bytes that an operation reads and writes; none for mere views."""
        if not written:
            return 0, 0
        sizes = sorted(self._seen.tensors[number].facts.nbytes for number in {*inputs})
        wrote = sum(self._seen.tensors[number].facts.nbytes for number in written)
        if func in LOOKUPS and sizes:
            sizes[-1] = min(sizes[-1], wrote)
        return sum(sizes), wrote

    @contextmanager
    def _watching(self, model: nn.Module) -> Iterator[None]:
        """Context in which the calls of modules inside of a model are seen."""
        handles = []
        for name, module in model.named_modules():
            if module is not model:
                begin = module.register_forward_pre_hook(partial(self._begin, name), prepend=True)
                end = module.register_forward_hook(self._end, with_kwargs=True, always_call=True)
                handles += [begin, end]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, name: str, module: nn.Module, args: Any) -> None:
        self._running.append(_Running(name, len(self._operations)))

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, start = self._running.pop()
        given = tuple(self._seen.number(tensor) for tensor in tensors_in((args, kwargs)))
        made = tuple(self._seen.number(tensor) for tensor in tensors_in(output))
        operations = range(start, len(self._operations))
        hooked = bool(hooks_of_script(module))  # the forward itself may have put them on
        self._modules.append(ModuleCall(name, operations, given, made, hooked))

    def call(self, index: int, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Run a block, with random values if need be, and write its call down."""
        name, block = self.candidates[index]
        with torch._C.DisableTorchFunction():
            leaves = named_leaves(args, kwargs)
            copied, copied_kwargs = tree_map(self._copied, (tuple(args), dict(kwargs)))
        caller = self._open[-1][1] if self._open else None
        self._open.append((len(self._blocks), name))
        self._blocks.append(None)
        start = len(self._operations)
        given = [leaf for _, leaf in leaves]
        try:
            if (failure := self._needing_values.get(_kind_of(block))) is None:
                try:
                    result = compute(*args, **kwargs)
                except Exception as error:  # it may depend on values, or write into real tensors
                    self._needing_values[_kind_of(block)] = error  # its kind gets some from now on
                    raise _NeedsValues from error
            else:
                with self._values_for(block, copied, copied_kwargs, given) as (values, named):
                    try:
                        result = compute(*values, **named)
                    except Exception:
                        raise failure from None
                given = [leaf for _, leaf in named_leaves(values, named)]
        finally:
            place, _ = self._open.pop()
        operations = range(start, len(self._operations))
        with torch._C.DisableTorchFunction():
            flat, tree = tree_flatten(result)
            places = {id(leaf): i for i, leaf in enumerate(given)}
            arguments = [places.get(id(leaf)) for leaf in flat]
            handed = [
                self._handed(leaf if i is None else leaves[i][1], i is not None)
                for leaf, i in zip(flat, arguments, strict=True)
            ]
            self._blocks[place] = BlockCall(
                name,
                caller,
                operations,
                tuple(readable for readable, _ in leaves),
                tuple(self._seen.number_of(leaf) for _, leaf in leaves),
                copied,
                copied_kwargs,
                tree,
                tuple(
                    self._seen.returned(*leaf) for leaf in zip(flat, handed, arguments, strict=True)
                ),
            )
            if name in self._awaited:
                self._awaited.remove(name)
                if not self._awaited:
                    raise _Enough
            return tree.unflatten(handed)

    @contextmanager
    def _values_for(
        self, block: nn.Module, args: Any, kwargs: Any, leaves: Sequence[Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Context in which a block has random values; yields arguments with values.

        Operations are written down as if there were none.
        """

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, TensorRef):
                return copy.deepcopy(leaf)
            seen = self._seen.tensors[leaf.number]
            return random_like(seen.facts, seen.requires_grad)

        with ExitStack() as stack:
            stack.enter_context(rng.fork(SEED))  # ranks see the same operations
            with torch._C.DisableTorchFunction():
                for without, value in stack.enter_context(filled(block)):
                    self._seen.equate(value, self._seen.number(without))
                values: Any = tree_map(argument, (args, dict(kwargs)), is_leaf=_is_reference)
                for leaf, value in zip(leaves, tree_leaves(values), strict=True):
                    if isinstance(value, Tensor):
                        self._seen.equate(value, self._seen.number(leaf))
            outer, self._valued = self._valued, True
            try:
                yield values
            finally:
                self._valued = outer

    def _copied(self, leaf: Any) -> Any:
        """Return an argument for a later call; objects that can change are copied."""
        if isinstance(leaf, ValuelessTensor):
            return TensorRef(self._seen.number(leaf))
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        try:
            return copy.deepcopy(leaf)
        except Exception:  # a lock, say; whoever calls the block again will meet it
            return leaf

    def _handed(self, leaf: Any, is_argument: bool) -> Any:
        """Return a leaf of a block's result as the code after the block gets it."""
        if not isinstance(leaf, Tensor):
            return leaf
        has_values = not isinstance(leaf, ValuelessTensor)
        if self._isolated:
            return leaf if is_argument and has_values else self._kind.of(leaf)
        number = self._seen.number(leaf)
        if self._seen.tensors[number].known or not has_values:
            return leaf
        other = self._kind.of(leaf)  # the values were only for the block
        self._seen.equate(other, number)
        return other


def _kind_of(block: nn.Module) -> Hashable:
    return type(block), tuple(tuple(parameter.shape) for parameter in block.parameters())


def _is_reference(value: Any) -> bool:
    return isinstance(value, TensorRef)


def _shown(tensor: Tensor, given: Sequence[Tensor]) -> tuple[int | None, int]:
    """Return the place of the argument whose memory a new tensor shows, and where it begins."""
    if isinstance(tensor, ValuelessTensor):
        return (None, 0) if tensor.shown is None else tensor.shown
    with torch._C.DisableTorchFunction():
        for place, base in enumerate(given):
            if tensor.layout is not torch.strided or base.layout is not torch.strided:
                continue
            if tensor.untyped_storage()._cdata == base.untyped_storage()._cdata:
                return place, int(tensor.storage_offset() - base.storage_offset())
    return None, 0
