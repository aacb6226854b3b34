"""Gives a module another forward and takes it away; changes around the layers of a block.

The module stays the object it is: only its class becomes a subclass, made on the fly, of the same
name. Its attributes, parameters, hooks and its place in the model are untouched. ``torch.compile``
traces what is made of tensors and of operators that it knows (``tensor/operators``), and is set
aside elsewhere.

What ranks change around the layers of a block: the ends of regions, the sizes in reshapes.

Both serve code of the user: with its own weights, and with sizes of the whole that it counts with.
"""

import copy
import copyreg
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.losses import head_loss
from drivetrain.model.guard import STANDS_FOR, Arguments, Function, Keywords
from drivetrain.model.modules import uncompiled
from drivetrain_megatron.tensor import operators
from drivetrain_megatron.tensor.operators import Edges, Uncopied, reduce
from drivetrain_megatron.tensor.partition import Partition, even

# --- gives one module of the user another forward, and takes it away again ---

_KEY = "_drivetrain_tensor_parallel"
_SHARED = "_drivetrain_shared_parameters"

KEPT = "_drivetrain_keeps_parameters"
"""The attribute of modules that refuse others in the places of their parameters."""


class Computing(threading.local):
    """Context of a thread in which parameters are shares, those of any copy of a model too."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1


computing = Computing()


class Behavior(Uncopied, ABC):
    """The forward of a module on ranks that share its work.

    A copy of the module (an average of weights, say) shares the behavior: it is made on every rank
    and computes with the same ranks. There are no pickles: code around the module may count with
    sizes of this rank's share.
    """

    @property
    def is_traced(self) -> bool:
        """Whether ``torch.compile`` may trace the forward."""
        return False

    @abstractmethod
    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the output that the module's own forward has with whole parameters."""

    def loss(self, module: Any, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Compute ``head_loss`` of ``drivetrain.losses``: of a whole layer, unless overridden."""
        return head_loss(module, hidden, target, **options)


class Own(Behavior):
    """The forward of the module's own class."""

    is_traced = True

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute by the module's own class."""
        return original_class(module).forward(module, *args, **kwargs)


@dataclass(frozen=True)
class Surrounding(Behavior):
    """A module's behavior inside of a context that is made for each call."""

    inner: Behavior
    around: Callable[[nn.Module], AbstractContextManager[object]]

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute as the module does."""
        with self.around(module):
            return self.inner.forward(module, *args, **kwargs)


class Parallel:
    """Mixed into the class of a module that has a behavior."""

    _drivetrain_original: type[nn.Module]

    @property
    def _ranks_share_forward(self) -> bool:  # drivetrain.model.modules.SHARED
        behavior: Behavior = self.__dict__[_KEY]
        return not behavior.is_traced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute by the behavior.

        Raises:
            UsageError: another tensor stands in the place of a share.
        """
        behavior = self.__dict__[_KEY]
        if torch.compiler.is_compiling() and behavior.is_traced:
            self._check_shares()
            return behavior.forward(self, *args, **kwargs)
        return self._apart(*args, **kwargs)

    @_disable_dynamo
    def _apart(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_shares():
            return self.__dict__[_KEY].forward(self, *args, **kwargs)

    @_disable_dynamo
    def _drivetrain_loss_in_pieces(self, *args: Any, **options: Any) -> Tensor:
        """Be ``drivetrain.losses.DIVIDED``: compute the loss of a head by the behavior.

        Raises:
            UsageError: as ``forward``.
        """
        with self._on_shares():
            found: Tensor = self.__dict__[_KEY].loss(self, *args, **options)
            return found

    @contextmanager
    def _on_shares(self) -> Iterator[None]:
        """Context in which parameters are shares."""
        self._check_shares()
        with computing:
            yield

    def _check_shares(self) -> None:
        module: Any = self
        for child, name in module.__dict__.get(_SHARED, ()):
            owner = module._modules.get(child) if child else module
            held = None if owner is None else owner._parameters.get(name)
            known = hasattr(held, SHARE) or hasattr(held, STANDS_FOR)
            if type(held) in _ORDINARY and not known:
                full = f"{child}.{name}" if child else name
                raise UsageError(
                    f"expected this rank's share of {full!r} in {original_class(module).__name__}, "
                    "found another tensor in its place, as by torch.func.functional_call(), or in "
                    "a copy that was made inside of gathered(): ranks compute together with shares "
                    "of parameters. Copy the model outside of gathered(), and write other values "
                    "into the parameters, or set tp: 1"
                )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse a parameter of the module under a further name, as pruning gives it one.

        Raises:
            UsageError: it is that.
        """
        module: Any = self
        for known, held in module._parameters.items():
            shown = module.__dict__.get(known, held)  # in a pipeline, of another stage
            if param is not None and shown is param and known != name:
                raise _computed(module, known)
        super().register_parameter(name, param)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another parameter in the place of one; on other stages a proxy stands for it.

        Raises:
            UsageError: the module keeps its parameters.
        """
        own = self.__dict__
        if KEPT not in own or name not in own["_parameters"]:
            super().__setattr__(name, value)
        elif getattr(value, STANDS_FOR, value) is not own["_parameters"][name]:
            raise _computed(self, name)

    def __delattr__(self, name: str) -> None:
        """Refuse to delete a parameter, as parametrizations do to put a computed one in its place.

        Raises:
            UsageError: it is one.
        """
        if name in self.__dict__["_parameters"]:
            raise _computed(self, name)
        super().__delattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = memo[id(self)] = self.__copy__()
        state = {key: copy.deepcopy(value, memo) for key, value in new.__dict__.items()}
        new.__dict__.update(state)
        return new

    def __copy__(self) -> Any:
        """Return a module with the same members; an ordinary one if it computes by itself."""
        state = {key: value for key, value in self.__dict__.items() if key != KEPT}
        kind: type[Any] = type(self)
        if type(state[_KEY]) is Own and _SHARED not in state:
            kind = self._drivetrain_original
            del state[_KEY]
        new = object.__new__(kind)
        new.__dict__.update(state)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        ordinary = self.__copy__()
        if not isinstance(ordinary, Parallel):
            _, _, *state = ordinary.__reduce_ex__(protocol)
            # Unlike copyreg.__newobj__, it makes an object of another class than this one's.
            return copyreg._reconstructor, (type(ordinary), object, None), *state  # type: ignore[attr-defined]
        raise UsageError(
            f"expected a module to pickle that is whole, found {self._drivetrain_original.__name__}"
            ", which ranks share: save state_dict() on every rank, or "
            "accelerator.get_state_dict(model), and build the module anew"
        )


def _computed(module: Any, name: str) -> UsageError:
    return UsageError(
        f"expected the parameters of a layer as they were in prepare(), found that {name!r} of "
        f"{original_class(module).__name__} is about to be deleted, replaced by another one (also "
        "where the two shall be tied), or computed from it as by torch.nn.utils.prune and "
        "parametrizations: ranks hold parts of it, or other layers; change the layer before "
        "prepare(), or take a strategy over the axis dp alone"
    )


SHARE = "_share"
"""The attribute of parameters of which this rank has a share."""

_ORDINARY = (Tensor, nn.Parameter)
"""A pipeline puts others in the places of parameters, for what other stages have."""


def know_shares(module: nn.Module, mine: Collection[Tensor]) -> bool:
    """Let a module compute with shares only; return whether it has parameters that are shares.

    Those of its children count for it, too: attention reads its projection's by itself.

    Args:
        module: of any kind.
        mine: parameters of which this rank has a share.
    """
    found = tuple(
        (child, name)
        for child, part in {"": module, **module._modules}.items()
        if part is not None
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter in mine
    )
    if found:
        module.__dict__[_SHARED] = found
    return any(not child for child, _ in found)


def attach(module: nn.Module, behavior: Behavior, **members: Any) -> None:
    """Let a module, whose parameters are cut by somebody else, compute by a behavior.

    Its class gets further members, such as properties that hide attributes.

    Raises:
        UsageError: the module has a behavior already.
    """
    if behavior_of(module) is not None:
        raise UsageError(
            f"expected a module that is not divided yet, found {module!r} with "
            f"{behavior_of(module)}; detach() first"
        )
    original: Any = type(module)
    module.__class__ = _made(original, tuple(members.items()))
    module.__dict__[_KEY] = behavior


@functools.lru_cache(maxsize=256)
def _made(original: type[nn.Module], members: tuple[tuple[str, Any], ...]) -> type[nn.Module]:
    """Return the class of modules with a behavior, shared so that blocks remain alike."""
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (Parallel, original)

    @functools.wraps(original.forward)  # libraries ask for the names of its arguments
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return Parallel.forward(module, *args, **kwargs)

    own = {"_drivetrain_original": original, "forward": forward, **dict(members)}
    return type(original.__name__, bases, {**names, **own})


def detach(module: nn.Module) -> None:
    """Give a module its own forward back; its parameters stay as they are."""
    if isinstance(module, Parallel):
        restored: Any = module
        restored.__class__ = module._drivetrain_original
        module.__dict__.pop(_SHARED, None)
        del module.__dict__[_KEY]


def exchange(module: nn.Module, behavior: Behavior) -> None:
    """Replace the behavior of a module by another."""
    module.__dict__[_KEY] = behavior


def surround(
    module: nn.Module, around: Callable[[nn.Module], AbstractContextManager[object]]
) -> None:
    """Surround a module's behavior, or its own forward, with a context; ``release`` undoes this."""
    inner = behavior_of(module)
    if inner is None:
        attach(module, Surrounding(Own(), around))
    else:
        exchange(module, Surrounding(inner, around))


def release(module: nn.Module) -> None:
    """Undo the last ``surround`` of a module."""
    behavior = behavior_of(module)
    if not isinstance(behavior, Surrounding):
        return
    if isinstance(behavior.inner, Own):
        detach(module)
    else:
        module.__dict__[_KEY] = behavior.inner


def behavior_of(module: nn.Module) -> Behavior | None:
    """Return the behavior that was attached to a module, or None."""
    return module.__dict__.get(_KEY)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before anything was attached."""
    return module._drivetrain_original if isinstance(module, Parallel) else type(module)


logger = get_logger(__name__)

_COMPILED_CALL = "_compiled_call_impl"


class Uncompiled:
    """Lets compiled modules run as they are written, until ``undo``."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, Callable[..., Any]]] = []

    def set(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module] | None = None,
        reason: str = "because ranks share its layers",
    ) -> None:
        """Begin; a model of which nothing is compiled stays as it is.

        Args:
            model: the user's.
            modules: those to run as written; None for all.
            reason: for the user.
        """
        for module in model.modules() if modules is None else modules:
            inner = uncompiled(module)
            if inner is not module:  # the wrapper that torch.compile(module) returned
                self._put(module, "forward", inner)
            if module.__dict__.get(_COMPILED_CALL) is not None:  # module.compile()
                self._put(module, _COMPILED_CALL, None)
        if self._before:
            logger.announce(
                f"torch.compile: {type(uncompiled(model)).__name__} runs uncompiled, {reason}"
            )

    def undo(self) -> None:
        """End; modules are compiled again."""
        for members, name, value in self._before:
            members[name] = value
        self._before = []

    def _put(self, module: nn.Module, name: str, value: Callable[..., Any] | None) -> None:
        members = module.__dict__
        self._before.append((members, name, members[name]))
        members[name] = value


# --- the ends of a region of weights in no layer (Shoeybi et al. 2019, section 3) ---

# Each rank computes with a share of the inner features, and with all of the inputs: the gradients
# of all inputs are summed, also those of the weights with which a router mixes experts. The results
# are parts of a sum. A bias that is added before the sum has its share of features on each rank,
# and zeros elsewhere.


@dataclass(frozen=True, slots=True)
class RegionEnds(Uncopied):
    """Hooks on the modules where a region begins and ends."""

    ranks: Communicator

    @_disable_dynamo
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Be a forward pre-hook: everything that wants a gradient enters all ranks."""
        return tree_map(self._entered, (args, kwargs))

    def _entered(self, x: Any) -> Any:
        return operators.copy(x, self.ranks) if isinstance(x, Tensor) and x.requires_grad else x

    @_disable_dynamo
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

    @_disable_dynamo
    def begin(self, module: nn.Module, args: Any) -> None:
        """Be a forward pre-hook."""
        with computing:  # before the module's own forward
            share = getattr(module, self._name)
            module.__dict__[self._name] = F.pad(share, (self._before, self._after))

    @_disable_dynamo
    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook, also after an error."""
        module.__dict__.pop(self._name, None)


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
        of: the block, whose sizes and ranks count.
        dim: of activations that counts tokens; features and heads stand behind it.
        tokens: how many tokens a shard of the sequence has, and how many all have; None where
            activations are whole.
    """

    def __init__(self, of: "Resized", dim: int, tokens: tuple[int, int] | None) -> None:
        super().__init__()
        self._numbers, self._place, self._ranks = of.numbers, of.place, of.edges.ranks
        self._dim, self._tokens = dim, tokens

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
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
        if not tensors or scores.dim() < bias.dim():
            return bias
        for dim in range(last, -bias.dim() - 1, -1):
            every, some = bias.shape[dim], scores.shape[dim]
            if every != some and some == self._numbers.get(every):
                partition = even(dim, every, self._ranks.size)
                start, stop = next(iter(partition.ranges[self._ranks.rank]), (0, 0))
                return operators.copy(bias, self._ranks).narrow(dim, start, stop - start)
        return bias

    def _local(self, args: Arguments) -> Sequence[Any]:
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
    """A block whose reshapes get this rank's sizes, see ``LocalSizes``.

    Attributes:
        numbers: sizes of the whole, and their values on this rank.
        place: among several sizes that fit, counted from the right: 0, 1, …; the leftmost where
            there are fewer.
        edges: the ranks.
    """

    numbers: Mapping[int, int]
    place: int
    edges: Edges

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute by the module's own forward."""
        sequence = self.edges.sequence
        tokens = None
        if sequence is not None:
            tokens = (sequence.local_sizes[self.edges.ranks.rank], sequence.size)
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        dim = max(given.dim() - 2, 0)
        with LocalSizes(self, dim, tokens):
            return original_class(module).forward(module, *args, **kwargs)
