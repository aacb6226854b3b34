"""A run in the user's words: dtypes, samples per step, steps per epoch, the schedule's length.

Accelerate steps a schedule once per rank, so scripts multiply its length by the number of ranks.
Here such a schedule is too long; two lines, at the start and at the end of a run, let users see it.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from drivetrain.cost import TensorSpec
from drivetrain.data import PreparedLoader
from drivetrain.errors import UsageError
from drivetrain.facade.stepping import PreparedScheduler
from drivetrain.runtime.precision import Precision, dtype_word

_STEPS = "num_training_steps"
"""Name of the length in the schedules of transformers and of diffusers."""

_ROUNDING = 0.02
"""Steps of an epoch are rounded up: a schedule may differ so much from a multiple of the steps."""


def describe_step(
    loader: PreparedLoader, ranks: int, accumulation: int, schedulers: Iterable[PreparedScheduler]
) -> str:
    """Return one line about the samples of a step; "" where batches have no one size."""
    try:
        total = loader.total_batch_size
    except UsageError:
        return ""
    line = (
        f"{ranks} ranks x batch {total // ranks} x accumulation {accumulation} = "
        f"{total * accumulation} samples per step"
    )
    with suppress(TypeError):  # an iterable dataset has no length
        line += f", {-(-len(loader) // accumulation)} steps per epoch"
    lengths = {length for each in schedulers if (length := schedule_length(each)) is not None}
    if len(lengths) == 1:
        line += f"; the learning-rate schedule has {lengths.pop()} steps"
    return line


def schedule_length(scheduler: PreparedScheduler) -> int | None:
    """Return how many optimizer steps a schedule is made for, None where it does not say."""
    inner = scheduler.scheduler
    total = getattr(inner, "total_steps", None)
    if isinstance(total, int):
        return total // scheduler.steps_per_call
    for function in getattr(inner, "lr_lambdas", ()):
        value = _given(function).get(_STEPS)
        if isinstance(value, int):
            return value // scheduler.steps_per_call
    return None


def describe_unused_schedule(scheduler: PreparedScheduler, ranks: int) -> str:
    """Return one line if a run on N ranks ends after 1/N of a schedule's steps, "" otherwise."""
    length, taken = schedule_length(scheduler), getattr(scheduler.scheduler, "last_epoch", 0)
    if length is None or ranks == 1 or scheduler.steps_per_call > 1 or not taken:
        return ""
    if abs(length - taken * ranks) > max(ranks, _ROUNDING * length):
        return ""
    return (
        f"the learning-rate schedule has {length} steps, and the run took {taken}: 1 of {ranks}, "
        "which is the number of ranks. A schedule moves once per optimizer step here: if the "
        "script multiplies by num_processes, or counts the batches of a loader before prepare(), "
        "delete that, or keep Accelerate's rule with --set step_scheduler_with=samples"
    )


def _given(function: Any) -> dict[str, Any]:
    """Return the values that a function was made with: of a partial, or of a closure."""
    if isinstance(function, functools.partial):
        return dict(function.keywords)
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


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
