"""The result of a block: which tensors travel to the next block, and which values stay everywhere.

A result is a tree. Of its leaves, tensors that the block made are *carried*: they exist where the
block ran. A leaf that the block only handed through and that every stage has, such as a mask, is
*passed*: the argument of the call takes its place. Plain values such as None are *constants*.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from drivetrain.errors import UsageError
from drivetrain.model.look import BlockCall, Look

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, Enum)


class TensorMeta(NamedTuple):
    """The facts of a tensor that the receiver must know in advance.

    The last says whether a gradient goes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Carried(NamedTuple):
    """A tensor that the block made, by its place among the carried tensors of the result."""

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
        leaves: the kinds of its leaves.
        arguments: how many leaves the arguments of the call had.
        metas: of the carried tensors, in order.
    """

    tree: TreeSpec
    leaves: tuple[Leaf, ...]
    arguments: int
    metas: tuple[TensorMeta, ...]

    def carried(self, block: str, result: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a result of a block that travel, in order.

        Raises:
            UsageError: the result is another tree than the recorded one.
        """
        leaves, tree = tree_flatten(result)
        if tree != self.tree:
            found, expected = _in_words(tree), _in_words(self.tree)
            raise changed(block, f"a result of {found}", f"a result of {expected}")
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
        """Return the tree with given tensors, and with leaves of the arguments of this call.

        Raises:
            UsageError: arguments are returned, and the call has another number of them than the
                recorded one.
        """
        passes = any(isinstance(leaf, Passed) for leaf in self.leaves)
        if passes and len(arguments) != self.arguments:
            raise changed(block, f"{len(arguments)} arguments", f"{self.arguments}")

        def fill(leaf: Leaf) -> Any:
            if isinstance(leaf, Carried):
                return tensors[leaf.place]
            return arguments[leaf.place] if isinstance(leaf, Passed) else leaf.value

        return self.tree.unflatten([fill(leaf) for leaf in self.leaves])


def _in_words(tree: TreeSpec) -> str:
    """Return the structure of a result in one line, such as ``tuple (value, list of 3 values)``."""
    if tree.is_leaf():
        return "value"
    parts, kind = tree.children(), tree.type.__name__
    if len(parts) > 1 and all(part.is_leaf() for part in parts):
        return f"{kind} of {len(parts)} values"
    return f"{kind} ({', '.join(map(_in_words, parts))})"


def changed(block: str, found: str, expected: str) -> UsageError:
    """Return the error for a block that is not called as when the model was recorded."""
    return UsageError(
        f"expected block {block!r} to be called as in the recording of the model, with {expected}, "
        f"found {found}: the stages of a pipeline need the same structure in every forward; call "
        "the model with the same arguments, or give model.example_inputs those that it trains with"
    )


def described(call: BlockCall, look: Look, everywhere: Callable[[int], bool]) -> Structure:
    """Return the structure of a block's result; ``everywhere`` tells the tensors of all stages.

    Raises:
        UsageError: the result holds an object that other stages cannot have.
    """
    kinds: list[Leaf] = []
    metas: list[TensorMeta] = []
    for leaf in call.returned:
        is_plain = leaf.number is None and isinstance(leaf.value, PLAIN)
        shared = leaf.number is None or everywhere(leaf.number)
        if leaf.argument is not None and not is_plain and shared:
            kinds.append(Passed(leaf.argument))
        elif leaf.number is not None:
            kinds.append(Carried(len(metas)))
            facts = look.tensors[leaf.number].facts
            metas.append(TensorMeta(facts.shape, facts.dtype, leaf.requires_grad))
        elif is_plain:
            kinds.append(Constant(leaf.value))
        else:
            raise UsageError(
                f"expected block {call.name!r} to return tensors, plain values or its own "
                f"arguments, found a {type(leaf.value).__name__}: other pipeline stages cannot "
                "have this object; return its tensors in a tuple or dict, or make it before the "
                "first block"
            )
    return Structure(call.tree, tuple(kinds), len(call.given), tuple(metas))
