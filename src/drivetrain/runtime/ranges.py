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


def named_range(kind: str, name: object) -> AbstractContextManager[object]:
    """Return the range of something else; its name begins with the kind."""
    return record_function(f"{kind}{name}") if is_profiled() else _NOTHING
