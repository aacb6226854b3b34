"""Memory that does not suffice: batch sizes that fit, and the release of unused objects."""

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from drivetrain.errors import UsageError

_SHRINK = 0.9
"""Factor of the batch size after each failure, rounded down."""


class CallError(UsageError, TypeError):
    """The arguments of a call do not fit its function."""


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function to be called again with a smaller batch size while memory runs out.

    All ranks must run out of memory together, as they do when their batches are equally large: a
    rank that fails alone leaves the others waiting in a collective.

    Args:
        function: takes the batch size as its first argument; callers leave it out.
        starting_batch_size: the first size tried, by every call.
        reduce_batch_size_fn: returns the next size; None means nine tenths of the last.

    Raises:
        CallError: the caller passed the batch size, or other arguments do not fit.
        UsageError: the next size is no smaller than the last.
        RuntimeError: not even one sample fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    inner = function

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _check_call(inner, starting_batch_size, args, kwargs)
        batch_size = starting_batch_size
        while batch_size > 0:
            try:
                return inner(batch_size, *args, **kwargs)
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise
            # Out of the except clause: there the traceback keeps the failed try's tensors alive.
            release_memory()
            batch_size = _next_size(batch_size, reduce_batch_size_fn)
        raise RuntimeError(
            f"no batch size fits: started with {starting_batch_size}, ended at zero; make the "
            "model smaller or divide it with another strategy"
        )

    return wrapper


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and empty the accelerator's cache.

    Returns:
        A None for each object, so that ``a, b = release_memory(a, b)`` drops the references.
    """
    released = [None for _ in objects]
    del objects
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return released


def _next_size(batch_size: int, rule: Callable[[], int] | None) -> int:
    smaller = rule() if rule is not None else int(batch_size * _SHRINK)
    if smaller >= batch_size:
        raise UsageError(
            f"expected reduce_batch_size_fn to return a batch size less than {batch_size}, "
            f"found {smaller}; training would never end"
        )
    return smaller


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    texts = ("out of memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _check_call(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        inspect.signature(function).bind(size, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise CallError(
            f"the decorator passes the batch size to {name}() itself, as the first argument; "
            f"with it the call does not fit: {error}; call {name}() without a batch size"
        ) from None
