"""Random states of rank 0, given to all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from drivetrain import communication
from drivetrain.errors import UsageError
from drivetrain.runtime import rng


def synchronize_rng_states(
    rng_types: Sequence[str], generator: torch.Generator | None = None
) -> None:
    """Give every rank the generator states of rank 0; collective, does nothing with one rank.

    Args:
        rng_types: any of ``python``, ``numpy``, ``torch``, ``accelerator`` (or the accelerator's
            own name, as ``cuda``), and ``generator`` for the generator that is passed.
        generator: a CPU generator; without one, ``generator`` has nothing to do.

    Raises:
        UsageError: a type is unknown.
    """
    known = {"python", "numpy", "torch", "accelerator", "generator"}
    current = torch.accelerator.current_accelerator()
    aliases = {} if current is None else {current.type: "accelerator"}
    keys = [aliases.get(name, name) for name in rng_types]
    if not known.issuperset(keys):
        raise UsageError(
            f"expected rng_types among {sorted(known | set(aliases))}, found {list(rng_types)}"
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    state = rng.capture()
    rng.restore({key: communication.broadcast(state[key]) for key in keys if key in state})
    if "generator" in keys and generator is not None:
        generator.set_state(communication.broadcast(generator.get_state()))
