"""The precision of a model: its forward computes in the run's dtype, and a line says all dtypes."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from drivetrain.cost import TensorSpec
from drivetrain.nested import convert_to_fp32
from drivetrain.parts.torch_calls import Arguments, Function, Keywords
from drivetrain.parts.wrapping import is_wrapped, unwrap_forward, wrap_forward
from drivetrain.runtime.precision import Precision, dtype_word

_ORIGINAL = "_forward_before_prepare"


def compute_in(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the model's forward inside a context; floating point outputs become fp32.

    A deep copy of the model computes in the same context, with its own parameters; a pickled model
    computes as its class says. ``restore_forward`` undoes the change.
    """
    if is_wrapped(model, _ORIGINAL):
        return

    def in_context(module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        with context():
            outputs = compute(*args, **kwargs)
        return convert_to_fp32(outputs)

    wrap_forward(model, _ORIGINAL, in_context)


def restore_forward(model: nn.Module) -> None:
    """Give a model back the forward it had before ``compute_in``."""
    unwrap_forward(model, _ORIGINAL)


def describe_dtypes(
    model: nn.Module, given: Sequence[TensorSpec], precision: Precision, *, autocast: bool
) -> str:
    """Return one line with the dtypes of a model, and how many parameters have each.

    ``given`` are the parameters before ``prepare``; ``autocast`` tells whether forward computes in
    the policy's dtype.
    """
    elements: Counter[torch.dtype] = Counter()
    tensors: Counter[torch.dtype] = Counter()
    for spec in given:
        dtype = precision.forward_dtype(spec.dtype, spec.shape)
        elements[dtype] += spec.numel
        tensors[dtype] += 1
    order = [dtype for dtype, _ in elements.most_common()]
    param = " and ".join(
        f"{dtype_word(dtype)} ({elements[dtype]:,} in {tensors[dtype]:,})" for dtype in order
    )
    compute = [precision.compute] if autocast and precision.compute else order
    trained = [spec for spec in given if spec.trainable]
    reduce = (
        precision.reduce_dtype(precision.forward_dtype(spec.dtype, spec.shape)) for spec in trained
    )
    master = (precision.master_dtype(spec.dtype, spec.shape) for spec in trained)
    return (
        f"precision of {type(model).__name__}: param {param}, compute {_words(compute)}, "
        f"reduce {_words(reduce)}, master {_words(master)}"
    )


def _words(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(dict.fromkeys(map(dtype_word, dtypes))) or "none"
