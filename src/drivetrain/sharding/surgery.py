"""Lets a script read and change whole parameters: what rank 0 changed becomes everybody's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.sharding.unit import Unit

_PIECE = 1 << 20
_PRIME = 1_000_003
_RANGE = 1 << 62
_WORDS = {1: torch.int8, 2: torch.int16}


@contextmanager
def changes_accepted(units: Sequence[Unit], communicator: Communicator) -> Iterator[None]:
    """Context in which whole parameters may be changed, on all ranks alike or on rank 0 alone.

    Changes are found by comparing fingerprints, so it does not matter how they were made.

    Args:
        units: whole inside of the context.
        communicator: all ranks that train the model.
    """
    before = [_fingerprints(unit) for unit in units]
    yield
    after = [_fingerprints(unit) for unit in units]
    changed = [old != new for old, new in zip(before, after, strict=True)]
    if not units:
        return
    flags = torch.tensor(changed, dtype=torch.uint8, device=units[0].values[0].device)
    communicator.all_reduce(flags, reduction="max", label="changed parameters").wait()
    for unit, flag in zip(units, flags.tolist(), strict=True):
        if flag:
            unit.accept(communicator)


def _fingerprints(unit: Unit) -> list[int]:
    return [fingerprint(flat) for flat in unit.values]


@torch.no_grad()
def fingerprint(flat: Tensor) -> int:
    """Return a number that changes when an element changes or elements swap places.

    Args:
        flat: 1-D, of any dtype; read in pieces, so memory stays constant.
    """
    total = 0
    words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
    for piece in torch.split(words, _PIECE):
        ramp = torch.arange(1, piece.numel() + 1, device=piece.device)
        total = (total * _PRIME + int((piece.to(torch.int64) * ramp).sum())) % _RANGE
    return total
