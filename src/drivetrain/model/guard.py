"""Parameters whose values are elsewhere or on their way: a touch brings them, or is refused.

A class with ``__torch_function__`` sees every use of a tensor from Python. Facts such as the shape
cost nothing, writing may be refused, everything else needs values: so the functions of torch are
told apart first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import UsageError

Function: TypeAlias = Callable[..., Any]
Arguments: TypeAlias = Sequence[Any]
Keywords: TypeAlias = Mapping[str, Any]

_QUESTIONS = """
    size dim ndimension nelement numel stride is_floating_point is_complex is_contiguous __len__
    element_size get_device is_signed storage_offset requires_grad_ register_hook retain_grad
    register_post_accumulate_grad_hook __hash__ dim_order is_same_size is_shared is_inference
    untyped_storage
"""

_ATTRIBUTES = """
    shape dtype device layout ndim requires_grad is_leaf grad grad_fn names is_cuda is_cpu is_meta
    is_mps is_xpu is_sparse is_quantized is_mkldnn is_nested itemsize nbytes _version output_nr
    retains_grad _backward_hooks _post_accumulate_grad_hooks
"""

_READERS = """
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__
    is_nonzero equal allclose nonzero masked_select data_ptr storage storage_type
    __reduce_ex__ __dlpack__ unique
"""

_CONSTANTS = "zeros_like ones_like full_like new_zeros new_ones new_full new_tensor"

_LOOKUPS = "__getitem__ embedding gather index_select take take_along_dim"

_OPERATORS = """
    __setitem__ __iadd__ __isub__ __imul__ __imatmul__ __itruediv__ __ifloordiv__ __imod__ __ipow__
    __iand__ __ior__ __ixor__ __ilshift__ __irshift__
"""
_COLLECTIVES = "all_reduce all_reduce_coalesced broadcast reduce recv irecv"
_WRITING = frozenset(f"{_OPERATORS} {_COLLECTIVES}".split())
"""Names of operators, and of torch's collectives, that write into their first argument."""


def _named(names: str) -> frozenset[Function]:
    """Return the functions and methods of these names; versions of torch lack some."""
    owners = (Tensor, torch, F)
    return frozenset(
        getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)
    )


READERS = _named(_READERS)
"""Functions whose result, or whose result's shape, depends on values."""

QUESTIONS = _named(_QUESTIONS)
"""Functions that only ask for facts, or set facts."""

CONSTANTS = _named(_CONSTANTS)
"""Functions that take a tensor's shape, dtype or device and make known values."""

BLANK = frozenset({torch.zeros, torch.empty, torch.zeros_like, Tensor.new_zeros})
"""Functions that make a tensor for a block to fill."""

LOOKUPS = _named(_LOOKUPS)
"""Functions that read of their largest argument only the elements that they return."""

FACTS: frozenset[Function] = frozenset(
    {
        *QUESTIONS,
        *(getattr(Tensor, each).__get__ for each in _ATTRIBUTES.split() if hasattr(Tensor, each)),
        Tensor.grad.__set__,  # type: ignore[union-attr]
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    }
)
"""Functions that need no values; by function rather than by name: every use of an absent parameter
asks."""


def asks_facts(function: Function) -> bool:
    """Return whether a function needs no values: shape, dtype, device, hooks, the gradient."""
    return function in FACTS


def name_of(function: Function) -> str:
    """Return the name of a function or method; of the attribute, for its getter and its setter.

    A setter has `` =`` behind the name.
    """
    name = str(getattr(function, "__name__", ""))
    if name not in {"__get__", "__set__"}:
        return name
    attribute = str(getattr(getattr(function, "__self__", None), "__name__", ""))
    return attribute if name == "__get__" else f"{attribute} ="


def writes_first(function: Function) -> bool:
    """Return whether a function writes into its first argument: in place, or an initializer."""
    name = name_of(function)
    return _writes(name) or name == "data ="


def targets(name: str, args: Arguments, kwargs: Keywords) -> Sequence[Any]:
    """Return the targets of a function that writes, ``out`` included; else a single None."""
    written = args[0] if _writes(name) and args else kwargs.get("out")
    return written if isinstance(written, list | tuple) else [written]


def _writes(name: str) -> bool:
    return (name.endswith("_") and not name.startswith("__")) or name in _WRITING


_ARRAYS = (Tensor.numpy, Tensor.__array__)


def sealed(function: Function, result: Any) -> Any:
    """Return the result of a function on a copy; an array refuses writes: they would be lost."""
    if function in _ARRAYS:
        result.flags.writeable = False
    return result


def refuse_transforms() -> None:
    """Refuse a forward inside of a transform of ``torch.func``, such as ``grad`` or ``vmap``.

    Its tensors have no memory that could be sent, or looked for in what autograd saves.

    Raises:
        UsageError: there is one.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UsageError(
            "expected a forward outside of the transforms of torch.func (grad, vjp, jvp, vmap and "
            "others), found one inside: ranks exchange parameters or activations in there, which "
            "transforms cannot see. Take torch.autograd.grad, or a loop over samples, or a "
            "strategy that keeps models whole, such as the default"
        )


# --- guarded parameters ---

# The parameter object is still the object of the user's model, optimizers and lists; only its class
# changes while its values are away, so nobody reads memory that is freed or half written. When the
# values are there the class is ``nn.Parameter`` again and nothing is in the way of a forward.


class Guard(Protocol):
    """Decides about every use of a guarded parameter."""

    def run(self, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Make the parameter's values available, unguard it, and return ``function``'s result."""


class RefusingGuard:
    """A guard that refuses every use.

    Args:
        refusal: returns the error for the arguments of a use.
    """

    def __init__(self, refusal: Callable[[Arguments, Keywords], UsageError]) -> None:
        self._refusal = refusal

    def run(self, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise self._refusal(args, kwargs)


class GuardedParameter(nn.Parameter):
    """A parameter that asks its guard before anything reads or writes its values."""

    _guard: Guard

    @classmethod
    @_disable_dynamo  # in a compiled block: the values come, and the graph has a gap
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Answer questions about facts at once; pass everything else to the guard."""
        kwargs = kwargs or {}
        if asks_facts(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        guarded = next(leaf for leaf in tree_leaves((args, kwargs)) if is_guarded(leaf))
        return guarded._guard.run(func, args, kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:  # which torch shows to no such function
        """Take other memory."""
        return self._guard.run(Tensor.set_, (self, *args), kwargs)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._guard.run(nn.Parameter.__deepcopy__, (self, memo), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._guard.run(nn.Parameter.__reduce_ex__, (self, protocol), {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(values elsewhere, shape {tuple(self.shape)}, {self.dtype})"

    def __format__(self, spec: str) -> str:
        if self.dim():
            return object.__format__(self, spec)  # as repr: one rank may print by itself
        return str(self._guard.run(nn.Parameter.__format__, (self, spec), {}))


class Elsewhere(nn.Parameter):
    """A parameter that other ranks hold: this one has the user's object, and a copy of values.

    Strategies here do not know it (``naming.named_parameters``); copies and pickles are ordinary.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]


class Unlisted:
    """Stands for such a parameter in the attributes of a module that does not list it for now."""


STANDS_FOR = "_stands_for"
"""The attribute of what stands in a tensor's place: which one that is; None for a buffer."""


class StandIn(GuardedParameter, Elsewhere):
    """The same without values: its guard decides about every use."""


def is_guarded(value: object) -> bool:
    """Return whether a parameter's values are away."""
    return issubclass(type(value), GuardedParameter)


def writes(function: Function, args: Arguments, kwargs: Keywords) -> bool:
    """Return whether a use (``copy_``, ``+=``, an initializer) writes into a guarded parameter.

    Functions that write do so into their first argument, and need no look at the values.
    """
    if not writes_first(function):
        return False
    first = [*args, *kwargs.values()][:1]
    return any(is_guarded(leaf) for leaf in tree_leaves(first))


def guard(parameter: Tensor, by: Guard, kind: type[GuardedParameter] = GuardedParameter) -> None:
    """Let a guard decide about every use of a parameter's values."""
    parameter.__class__ = kind
    parameter._guard = by  # type: ignore[attr-defined]


def unguard(parameter: nn.Parameter) -> None:
    """Make a parameter an ordinary one again: its values are there."""
    if issubclass(type(parameter), GuardedParameter):
        parameter.__class__ = nn.Parameter
        del parameter._guard  # type: ignore[attr-defined]  # copies and pickles must not drag it


def check_ordinary(name: str, parameter: nn.Parameter) -> None:
    """Refuse parameters that have a class of their own, whose behavior a guard would hide.

    Raises:
        UsageError: names the parameter and its class.
    """
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        raise UsageError(
            f"expected ordinary dense parameters, found {name!r} of class "
            f"{type(parameter).__name__} and layout {parameter.layout}; keep it out of the model "
            "that is prepared, or use a strategy that replicates parameters"
        )


# --- copies in the place of views: what a script writes into them would be lost, and is refused ---


class CopyInstead(Tensor):
    """A copy that a script got in the place of a view: its writes there would be lost.

    Views of it are such tensors too; whatever is computed from it is an ordinary tensor.
    """

    _refusal: UsageError

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a tensor that the script may change."""
        memo[id(self)] = own = self.detach().clone()
        return own

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, as an ordinary tensor."""
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse writes, and run everything else.

        Raises:
            UsageError: the function writes into the copy.
        """
        kwargs = kwargs or {}
        copies = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        first = tree_leaves([*args, *kwargs.values()][:1])
        if writes_first(func) and any(isinstance(leaf, cls) for leaf in first):
            raise copies[0]._refusal
        with torch._C.DisableTorchFunctionSubclass():
            result = sealed(func, func(*args, **kwargs))
            storages = {copy.untyped_storage()._cdata: copy._refusal for copy in copies}
            return tree_map(lambda leaf: _read_only_view(leaf, storages), result)


def _read_only_view(leaf: Any, storages: Mapping[int, UsageError]) -> Any:
    """Refuse writes into a tensor that lies in the memory of a copy."""
    if type(leaf) is Tensor and leaf.layout is torch.strided:
        refused = storages.get(leaf.untyped_storage()._cdata)
        if refused is not None:
            return read_only(leaf, refused)
    return leaf


def read_only(copy: Tensor, refused: UsageError) -> Tensor:
    """Make a tensor refuse writes with an error."""
    copy.__class__ = CopyInstead
    copy._refusal = refused  # type: ignore[attr-defined]
    return copy
