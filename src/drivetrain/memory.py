"""Making do with the memory there is: batch sizes that fit, and letting go of what is unused."""

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from drivetrain.errors import UsageError

_SHRINK = 0.9
"""Factor of the batch size after each failure; at least one sample less."""


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function to be called again with a smaller batch size while memory runs out.

    Args:
        function: takes the batch size as its first argument.
        starting_batch_size: the first size tried.
        reduce_batch_size_fn: returns the next size; None means nine tenths of the last.

    Raises:
        UsageError: the caller passed the batch size itself.
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
        _refuse_batch_size(inner, args)
        batch_size = starting_batch_size
        while batch_size > 0:
            try:
                return inner(batch_size, *args, **kwargs)
            except Exception as error:
                if not _out_of_memory(error):
                    raise
            release_memory()
            smaller = min(int(batch_size * _SHRINK), batch_size - 1)
            batch_size = reduce_batch_size_fn() if reduce_batch_size_fn else smaller
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


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    texts = ("out of memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _refuse_batch_size(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) < len(args) + 1:
        shown = ", ".join(
            f"{name}={value!r}" for name, value in zip(parameters[1:], args[1:], strict=False)
        )
        raise UsageError(
            f"the batch size is passed to {function.__name__} by its decorator; expected a call "
            f"without it: {function.__name__}({shown})"
        )
