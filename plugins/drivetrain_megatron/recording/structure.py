"""What a block returns: which tensors travel to the next block, and what is the same everywhere.

A result is a tree. Of its leaves, tensors that the block made are *carried*: they exist where the
block ran. What the block only handed through and that every stage has, such as a mask, is *passed*:
the argument of the call takes its place. Plain values such as None are *constants*.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path

from drivetrain.errors import UsageError
from drivetrain_megatron.recording.proxy import StageProxy

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, Enum)


class TensorMeta(NamedTuple):
    """What the receiver of a tensor must know before it comes.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        requires_grad: whether a gradient goes back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Carried(NamedTuple):
    """A tensor that the block made, by its place among those of the result."""

    place: int


class Passed(NamedTuple):
    """An argument that the block returned, by its place among the leaves of the arguments."""

    place: int


class Constant(NamedTuple):
    """A value that is the same in every call."""

    value: Any


Leaf: TypeAlias = Carried | Passed | Constant


@dataclass(frozen=True, slots=True)
class Structure:
    """The tree that a block returns.

    Attributes:
        tree: the shape of the tree.
        leaves: what its leaves are.
        arguments: how many leaves the arguments of the call had.
        metas: of the carried tensors, in order.
    """

    tree: TreeSpec
    leaves: tuple[Leaf, ...]
    arguments: int
    metas: tuple[TensorMeta, ...]

    def carried(self, block: str, result: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a result that travel, in order.

        Args:
            block: name of the block that returned it.
            result: what it returned.

        Raises:
            UsageError: the result is another tree than the recorded one.
        """
        leaves, tree = tree_flatten(result)
        if tree != self.tree:
            raise changed(block, f"a result with the structure {tree}", f"{self.tree}")
        chosen = [
            leaf
            for leaf, kind in zip(leaves, self.leaves, strict=True)
            if isinstance(kind, Carried)
        ]
        for leaf in chosen:
            if not isinstance(leaf, Tensor):
                raise changed(block, f"a {type(leaf).__name__} in its result", "a tensor")
        return tuple(chosen)

    def build(self, block: str, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
        """Return the tree with given tensors.

        Args:
            block: name of the block whose place is taken.
            tensors: the carried ones.
            arguments: the leaves of the arguments of this call.

        Raises:
            UsageError: the call has another number of arguments than the recorded one.
        """
        if len(arguments) != self.arguments:
            raise changed(block, f"{len(arguments)} arguments", f"{self.arguments}")

        def fill(leaf: Leaf) -> Any:
            if isinstance(leaf, Carried):
                return tensors[leaf.place]
            return arguments[leaf.place] if isinstance(leaf, Passed) else leaf.value

        return self.tree.unflatten([fill(leaf) for leaf in self.leaves])


def changed(block: str, found: str, expected: str) -> UsageError:
    """Return the error for a block that is called in another way than when it was recorded."""
    return UsageError(
        f"expected block {block!r} to be called as in the recording of the model, with {expected}, "
        f"found {found}: the stages of a pipeline need the same structure in every forward; call "
        "the model with the same arguments, or give model.dummy_inputs those that it trains with"
    )


def describe(block: str, arguments: Sequence[Any], result: Any) -> Structure:
    """Return the structure of a block's result, as it ran on proxies.

    Args:
        block: its name.
        arguments: leaves of its arguments.
        result: what it returned.

    Raises:
        UsageError: the result holds an object that other stages cannot have.
    """
    leaves, tree = tree_flatten(result)
    places = {id(leaf): i for i, leaf in enumerate(arguments)}
    kinds: list[Leaf] = []
    metas: list[TensorMeta] = []
    for leaf in leaves:
        if id(leaf) in places and not isinstance(leaf, PLAIN) and everywhere(leaf):
            kinds.append(Passed(places[id(leaf)]))
        elif isinstance(leaf, Tensor):
            kinds.append(Carried(len(metas)))
            metas.append(TensorMeta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, PLAIN):
            kinds.append(Constant(leaf))
        else:
            raise UsageError(
                f"expected block {block!r} to return tensors, plain values or its own arguments, "
                f"found a {type(leaf).__name__}: other pipeline stages cannot have this object; "
                "return its tensors in a tuple or dict, or make it before the first block"
            )
    return Structure(tree, tuple(kinds), len(arguments), tuple(metas))


def everywhere(leaf: Any) -> bool:
    """Whether every stage has this value itself: it depends on no parameter."""
    return not (isinstance(leaf, StageProxy) and leaf.phases)


def named_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the leaves of a call's arguments with readable names, such as ``2`` or ``mask[0]``."""
    flat, _ = tree_flatten_with_path((tuple(args), dict(kwargs)))
    return [(_readable(keystr(path[1:])), leaf) for path, leaf in flat]


def _readable(path: str) -> str:
    first, _, rest = path.partition("]")
    return first.strip("['") + rest


Compute: TypeAlias = Callable[..., Any]
