"""What the C library of a rank does with memory that is freed: keep it for the next step.

A training step on the CPU frees and allocates gigabytes: activations, gradients, gathered units.
glibc hands large blocks back to the system, which must fill each page with zeros before the next
step gets it again; that costs a quarter of the time of a small model's step.
"""

import os
from collections.abc import Mapping

from drivetrain.config import LaunchConfig

_MMAP_THRESHOLD = 32 << 20
"""Smallest block that is mapped and unmapped by itself; glibc allows no more."""

_TRIM_THRESHOLD = 1 << 40
"""Free memory at the end of the heap that is kept: all of it."""

_TUNABLES = "GLIBC_TUNABLES"


def heap_variables(launch: LaunchConfig, *, accelerators: int) -> Mapping[str, str]:
    """Return the variables for each rank; none where the user has made settings of the same kind.

    Other C libraries ignore them. Ranks that compute on accelerators keep their memory there, where
    torch has a pool of its own.
    """
    variables = {
        "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD),
    }
    chosen = any(os.environ.get(name) for name in variables)
    chosen = chosen or "malloc" in os.environ.get(_TUNABLES, "")
    return variables if launch.keep_memory and not accelerators and not chosen else {}
