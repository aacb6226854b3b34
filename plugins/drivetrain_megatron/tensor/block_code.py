"""What ranks change around the layers of a block: the ends of regions, the sizes in reshapes.

Both serve code of the user: with its own weights, and with sizes of the whole that it counts with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from drivetrain.collectives import Communicator
from drivetrain_megatron.tensor.behavior import Behavior, attach, computing, original_class
from drivetrain_megatron.tensor.operators import Edges, Uncopied, copy, reduce
from drivetrain_megatron.tensor.partition import Partition, even

# --- the ends of a region of weights in no layer (Shoeybi et al. 2019, section 3) ---

# Each rank computes with a share of the inner features, and with all of the inputs: the gradients
# of all inputs are summed, also those of the weights with which a router mixes experts. The results
# are parts of a sum. A bias that is added before the sum has its share of features on each rank,
# and zeros elsewhere.


@dataclass(frozen=True, slots=True)
class RegionEnds(Uncopied):
    """Hooks on the modules where a region begins and ends."""

    ranks: Communicator

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Be a forward pre-hook: everything that wants a gradient enters all ranks."""
        return tree_map(self._entered, (args, kwargs))

    def _entered(self, x: Any) -> Any:
        return copy(x, self.ranks) if isinstance(x, Tensor) and x.requires_grad else x

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Be a forward hook: the first tensor of a module's result is summed over ranks."""
        return with_first(output, lambda x: reduce(x, self.ranks))


def with_first(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's result in which the first tensor is replaced by a function of it."""
    if isinstance(output, Tensor):
        return function(output)
    first, *rest = output
    return type(output)((function(first), *rest))


class PaddedBias:
    """Two hooks: while a module runs, its code finds a bias of full size."""

    def __init__(self, name: str, partition: Partition, rank: int) -> None:
        self._name = name
        start, stop = next(iter(partition.ranges[rank]), (0, 0))
        self._before, self._after = start, partition.size - stop

    def begin(self, module: nn.Module, args: Any) -> None:
        """Be a forward pre-hook."""
        with computing:  # before the module's own forward
            share = getattr(module, self._name)
            module.__dict__[self._name] = F.pad(share, (self._before, self._after))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook, also after an error."""
        module.__dict__.pop(self._name, None)


def attach_region(entrance: nn.Module, leaving: nn.Module, ranks: Communicator) -> None:
    """Let inputs of the one module enter all ranks, and results of the other be summed."""
    ends = RegionEnds(ranks)
    entrance.register_forward_pre_hook(ends.enter, with_kwargs=True)
    leaving.register_forward_hook(ends.leave)


def attach_bias(module: nn.Module, name: str, partition: Partition, rank: int) -> None:
    """Let a module that adds a bias before the sum find the bias with zeros for other ranks."""
    bias = PaddedBias(name, partition, rank)
    module.register_forward_pre_hook(bias.begin)
    module.register_forward_hook(bias.end, always_call=True)


# --- reshapes of a block whose code counts with the sizes of the whole ---

# ``x.view(batch, length, 3, heads, dim // heads)`` asks for all heads, and the rank has some of
# them. If the sizes do not fit the tensor, and would with the rank's value of one size, this size
# is replaced. A bias of all heads that is added to the scores of some is cut. The trial tells
# whether that was meant.


_RESHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape})

_SUMS = frozenset({torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__})
"""Functions that add a bias of all heads, such as one of positions, to scores of local heads."""


class LocalSizes(TorchFunctionMode):
    """Puts this rank's sizes into reshapes that do not fit.

    Args:
        numbers: sizes of the whole, and their values on this rank.
        place: among several sizes that fit, counted from the right: 0, 1, …; the leftmost where
            there are fewer.
        dim: of activations that counts tokens; features and heads stand behind it.
        tokens: how many tokens a shard of the sequence has, and how many all have; None where
            activations are whole.
        ranks: the axis, to add a whole bias to local scores; None to leave sums alone.
    """

    def __init__(
        self,
        numbers: Mapping[int, int],
        place: int,
        dim: int,
        tokens: tuple[int, int] | None,
        ranks: Communicator | None = None,
    ) -> None:
        super().__init__()
        self._numbers = numbers
        self._place = place
        self._dim = dim
        self._tokens = tokens
        self._ranks = ranks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        if func in _RESHAPES and not kwargs:
            args = self._local(args)
        elif func in _SUMS:
            one, other, *rest = args
            args = (one, self._share(other, one), *rest)
        elif func is nn.functional.scaled_dot_product_attention and kwargs:
            mask = self._share(kwargs.get("attn_mask"), args[0] if args else None, last=-3)
            kwargs = {**kwargs, "attn_mask": mask}
        return func(*args, **(kwargs or {}))

    def _share(self, bias: Any, scores: Any, last: int = -1) -> Any:
        """Return a bias, with this rank's heads if it has all of them and the scores have some.

        All ranks give a part of the gradient of the bias.
        """
        tensors = isinstance(bias, Tensor) and isinstance(scores, Tensor)
        if not tensors or self._ranks is None or scores.dim() < bias.dim():
            return bias
        for dim in range(last, -bias.dim() - 1, -1):
            every, some = bias.shape[dim], scores.shape[dim]
            if every != some and some == self._numbers.get(every):
                partition = even(dim, every, self._ranks.size)
                start, stop = next(iter(partition.ranges[self._ranks.rank]), (0, 0))
                return copy(bias, self._ranks).narrow(dim, start, stop - start)
        return bias

    def _local(self, args: Sequence[Any]) -> Sequence[Any]:
        tensor, *sizes = args
        if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
            sizes = list(sizes[0])
        if not all(type(size) is int and size >= 0 for size in sizes):
            return args  # a dtype, or a size that torch works out
        sizes = self._with_tokens(tensor, sizes)
        found = _extent(tensor.shape) if 0 in sizes else tensor.numel()
        if _extent(sizes) != found:
            sizes = self._with_features(sizes, found)
        return (tensor, sizes)

    def _with_features(self, sizes: list[int], found: int) -> list[int]:
        """Return the sizes with this rank's features or heads, if they fit then."""
        wanted = _extent(sizes)
        fitting = [
            index
            for index, size in enumerate(sizes)
            if index > self._dim
            and size in self._numbers
            and wanted // size * self._numbers[size] == found
        ]
        if not fitting:
            return sizes
        index = fitting[max(len(fitting) - 1 - self._place, 0)]
        return _replaced(sizes, index, self._numbers[sizes[index]])

    def _with_tokens(self, tensor: Tensor, sizes: list[int]) -> list[int]:
        """Return the sizes with all tokens, where the tensor has them and a shard's were meant."""
        dim = self._dim
        if self._tokens is None or dim >= min(tensor.dim(), len(sizes)):
            return sizes
        some, every = self._tokens
        meant = sizes[dim] == some and tensor.shape[dim] == every
        return _replaced(sizes, dim, every) if meant else sizes


def _extent(sizes: Sequence[int]) -> int:
    """Return how many elements there are, leaving out dims that have none."""
    return prod(size or 1 for size in sizes)


def _replaced(sizes: Sequence[int], index: int, size: int) -> list[int]:
    return [*sizes[:index], size, *sizes[index + 1 :]]


@dataclass(frozen=True)
class Resized(Behavior):
    """A block whose reshapes get this rank's sizes, see ``LocalSizes``."""

    numbers: Mapping[int, int]
    place: int
    edges: Edges

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute by the module's own forward."""
        sequence = self.edges.sequence
        tokens = None
        if sequence is not None:
            tokens = (sequence.local_size(self.edges.ranks.rank), sequence.size)
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        dim = max(given.dim() - 2, 0)
        with LocalSizes(self.numbers, self.place, dim, tokens, self.edges.ranks):
            return original_class(module).forward(module, *args, **kwargs)


def attach_resized(module: nn.Module, numbers: Mapping[int, int], place: int, edges: Edges) -> None:
    """Let a block's reshapes get this rank's sizes."""
    attach(module, Resized(numbers, place, edges))
