"""Functions of torch by their use of a tensor: some read values, some ask for facts, some write."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drivetrain.parts.torch_calls import WRITING_OPERATORS

_READERS = """
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__
    is_nonzero equal allclose nonzero masked_select data_ptr storage storage_type
    __reduce_ex__ __dlpack__ unique
"""

_QUESTIONS = """
    size dim ndimension nelement numel stride is_floating_point is_complex is_contiguous __len__
    element_size get_device is_signed storage_offset requires_grad_ register_hook retain_grad
    __hash__ dim_order is_same_size is_shared is_inference untyped_storage
"""

_CONSTANTS = "zeros_like ones_like full_like new_zeros new_ones new_full new_tensor"

_LOOKUPS = "__getitem__ embedding gather index_select take take_along_dim"


def _named(names: str) -> frozenset[Callable[..., Any]]:
    """Return the functions and methods of these names."""
    owners = (Tensor, torch, F)
    return frozenset(
        getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)
    )


READERS = _named(_READERS)
"""Functions whose result, or whose result's shape, depends on values."""

QUESTIONS = _named(_QUESTIONS)
"""Functions that only ask for facts, or set what is no value."""

CONSTANTS = _named(_CONSTANTS)
"""Functions that take a tensor's shape, dtype or device and make known values."""

BLANK = frozenset({torch.zeros, torch.empty, torch.zeros_like, Tensor.new_zeros})
"""Functions that make a tensor for a block to fill."""

LOOKUPS = _named(_LOOKUPS)
"""Functions that read of their largest argument only the elements that they return."""


def targets(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the targets of a function that writes; a single None for other functions.

    Args:
        name: of the function; one that writes ends with ``_``, or is an augmented assignment.
        args: its arguments; it writes into the first.
        kwargs: its arguments by name; ``out`` is written into, too.
    """
    written = kwargs.get("out")
    in_place = name.endswith("_") and not name.startswith("__")
    if (in_place or name in WRITING_OPERATORS) and args:
        written = args[0]
    return written if isinstance(written, list | tuple) else [written]
