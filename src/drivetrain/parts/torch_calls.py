"""Which functions of torch ask for facts of a tensor, and which write into one: told by name.

For classes with ``__torch_function__``, whose tensors have no values or not yet: facts cost
nothing, writing may be refused, everything else needs values.
"""

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def name_of(function: Function) -> str:
    """Return the name of a function or method; of the attribute, for its getter and its setter.

    A setter has `` =`` behind the name.
    """
    name = str(getattr(function, "__name__", ""))
    if name not in {"__get__", "__set__"}:
        return name
    attribute = str(getattr(getattr(function, "__self__", None), "__name__", ""))
    return attribute if name == "__get__" else f"{attribute} ="


def asks_facts(function: Function) -> bool:
    """Return whether a function needs no values: shape, dtype, device, hooks, the gradient."""
    return function in _FACT_FUNCTIONS


def writes_first(function: Function) -> bool:
    """Return whether a function writes into its first argument: in place, or an initializer."""
    name = name_of(function)
    in_place = name.endswith("_") and not name.startswith("__")
    return in_place or name in WRITING_OPERATORS or name == "data ="


# fmt: off
FACTS = frozenset({
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn",
    "names", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized",
    "is_mkldnn", "is_nested", "itemsize", "nbytes", "_version", "_backward_hooks",
    "_post_accumulate_grad_hooks", "output_nr", "retains_grad", "grad =", "requires_grad =", "size",
    "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
    "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "get_device",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "untyped_storage",
    "__len__", "__hash__",
})
"""Names of attributes and methods that need no values; setters with `` =`` behind the name."""

WRITING_OPERATORS = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__",
    "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__",
    "__irshift__",
})
"""Operators of Python that write into their first operand."""
# fmt: on


def _functions(name: str) -> set[Function]:
    """Return the functions that a use calls; versions of torch lack some."""
    attribute, _, setter = name.partition(" ")
    member: Any = getattr(Tensor, attribute, None)
    if member is None:
        return set()
    if setter:
        return {member.__set__}
    found = {member if callable(member) else member.__get__}
    function = getattr(torch, attribute, None)  # torch.numel beside Tensor.numel
    return found | ({function} if isinstance(function, BuiltinFunctionType) else set())


_FACT_FUNCTIONS: frozenset[Function] = frozenset(
    function for name in FACTS for function in _functions(name)
)
"""By function rather than by name, because every use of an absent parameter asks."""
