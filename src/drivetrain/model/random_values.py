"""Random values for one block whose forward cannot run without any."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.model.results import Facts
from drivetrain.model.valueless import ValuelessTensor

SEED = 20210111
"""Of the values, and of whatever the block draws; any would do, the same on all ranks."""

_PERIOD = 65537
"""Random numbers that are drawn; a longer tensor repeats them, which takes no time. A prime: rows
of a matrix must differ."""


def random_like(facts: Facts, requires_grad: bool = False) -> Tensor:
    """Return a contiguous tensor of random numbers; zeros where they are no floating point."""
    made = torch.zeros(facts.shape, dtype=facts.dtype, device=facts.device)
    if facts.dtype.is_floating_point and made.numel():
        generator = torch.Generator().manual_seed(SEED)
        drawn = torch.randn(min(_PERIOD, made.numel()), generator=generator)
        spread = facts.shape[-1] ** -0.5 if len(facts.shape) > 1 else 1.0
        drawn = (drawn * spread).to(facts.device, facts.dtype)
        made.copy_(drawn.repeat(-(-made.numel() // _PERIOD))[: made.numel()].view(facts.shape))
    return made.requires_grad_(requires_grad)


@contextmanager
def filled(block: nn.Module) -> Iterator[list[tuple[ValuelessTensor, Tensor]]]:
    """Context in which a block's parameters and buffers have values; yields pairs (old, new).

    Also those that stand in a module's ``__dict__``, as tensors of other pipeline stages do.
    """
    pairs: dict[int, tuple[ValuelessTensor, Tensor]] = {}
    places: list[tuple[dict[str, Any], str, ValuelessTensor]] = []
    for module in block.modules():
        contents: tuple[dict[str, Any], ...] = (
            module._parameters,
            module._buffers,
            vars(module),
        )
        for owner, name, tensor in [(o, n, t) for o in contents for n, t in o.items()]:
            if isinstance(tensor, ValuelessTensor):
                if id(tensor) not in pairs:
                    value = random_like(tensor.facts, tensor.requires_grad)
                    pairs[id(tensor)] = tensor, value
                places.append((owner, name, tensor))
                owner[name] = pairs[id(tensor)][1]
    try:
        yield list(pairs.values())
    finally:
        for owner, name, tensor in places:
            owner[name] = tensor
