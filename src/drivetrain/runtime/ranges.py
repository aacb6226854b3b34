"""Named ranges in the trace of torch's profiler; while no profiler runs, one costs a question."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

COLLECTIVE = "collective: "
WAIT = "wait for "
FORWARD = "forward of "
RECOMPUTE = "forward again of "
BACKWARD = "backward of "
STAGE = "stage "
STEP = "step "
"""How the names of ranges begin, by kind."""

_NOTHING: AbstractContextManager[object] = nullcontext()


def is_profiled() -> bool:
    """Return whether torch's profiler records this process now."""
    return torch.autograd.profiler._is_profiler_enabled


def collective_range(
    operation: str, number: int, label: str, axis: str, *, waits: bool = False
) -> AbstractContextManager[object]:
    """Return the range of a collective, or of this thread's wait for the collective.

    Args:
        operation: which collective.
        number: its place in the order of its communicator; the same on all ranks.
        label: its purpose, or the line of its call.
        axis: the mesh axis that it runs over.
        waits: whether the range is that of a wait.
    """
    if not is_profiled():
        return _NOTHING
    what = f"{operation} #{number} ({_shortened(label)}) on {axis}"
    return record_function(f"{WAIT}{what}" if waits else f"{COLLECTIVE}{what}")


def named_range(kind: str, name: object) -> AbstractContextManager[object]:
    """Return the range of something else; its name begins with the kind."""
    return record_function(f"{kind}{name}") if is_profiled() else _NOTHING


def _shortened(label: str) -> str:
    """Return the last two parts of a path."""
    return "/".join(label.rsplit("/", 2)[-2:]) if label.startswith("/") else label
