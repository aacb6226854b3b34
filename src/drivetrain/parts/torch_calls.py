"""Which functions of torch ask for facts of a tensor, read its values, or write into the tensor.

For classes with ``__torch_function__``, whose tensors have no values or not yet: facts cost
nothing, writing may be refused, everything else needs values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

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
_WRITING_OPERATORS = frozenset(_OPERATORS.split())


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
    return (name.endswith("_") and not name.startswith("__")) or name in _WRITING_OPERATORS


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
