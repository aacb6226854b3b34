"""What cannot be done with a tensor whose values exist on another pipeline stage, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain_megatron.recording.shapes_of_ops import Function


def refuse_write(func: Function, real: Sequence[Tensor]) -> None:
    """Refuse to write values that are not there into real tensors.

    Args:
        func: of which a proxy is an argument.
        real: what it would write to and is no proxy.
    """
    for tensor in real:
        raise UsageError(
            f"expected values for {getattr(func, '__name__', '')}() to write, found a tensor whose "
            f"values exist on another pipeline stage, and a real tensor of shape "
            f"{tuple(tensor.shape)} as the target: make a new tensor instead (torch.where, "
            "torch.cat, a + b), or do this inside of one of the model's blocks"
        )


def refuse_backward(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse a backward of one stage alone."""
    raise UsageError(
        "expected accelerator.backward(loss), found a backward of its own on a loss whose values "
        "exist on another pipeline stage: the pipeline runs backward on all stages together"
    )


def refuse_assignment(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse to give a proxy other data."""
    raise UsageError(
        "expected to read .data, found an assignment to the .data of a tensor whose values exist "
        "on another pipeline stage: change it before accelerator.prepare()"
    )
