"""The record of one forward of a model: operations, calls of modules, tensors.

Tensors are known by numbers, in the order in which the forward met them. An operation names the
numbers of its arguments and results; so the operations are a graph of dependencies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_map_only

from drivetrain.model.guard import Arguments, Function, Keywords

if TYPE_CHECKING:
    from drivetrain.model.valueless import Facts


class TracedTensor(NamedTuple):
    """One tensor of a forward.

    Attributes:
        facts: shape, strides, dtype, device.
        requires_grad: whether a gradient would go back for it.
        known: whether it has values: it follows from the inputs and buffers alone.
    """

    facts: "Facts"
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
            is_leaf=lambda value: isinstance(value, TensorRef),
        )
        return args, kwargs


def named_leaves(args: Arguments, kwargs: Keywords) -> list[tuple[str, Any]]:
    """Return the leaves of a call's arguments with readable names, such as ``2`` or ``mask[0]``."""
    flat, _ = tree_flatten_with_path((tuple(args), dict(kwargs)))
    return [(_readable(keystr(path[1:])), leaf) for path, leaf in flat]


def _readable(path: str) -> str:
    first, _, rest = path.partition("]")
    return first.strip("['") + rest


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def to_device(tree: Any, device: torch.device) -> Any:
    """Return inputs with their tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)
