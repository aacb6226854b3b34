"""Checks of checkpoints under local steps, for any training of workers."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class WorkersTraining(Protocol):
    """A model, and its steps.

    Attributes:
        accelerator: saves and loads the training.
    """

    accelerator: Any

    def run(self, first: int, last: int) -> None:
        """Take the steps from first to last - 1."""

    def outer(self) -> Mapping[str, Tensor]:
        """Return the outer weights."""

    def own(self) -> Mapping[str, Tensor]:
        """Return the weights of this rank's worker."""

    def close(self) -> None:
        """Free the training's memory."""


def check_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def goes_on_bit_for_bit(
    folder: str, make: Callable[[], WorkersTraining], at: int = 6, last: int = 11, other: int = 1
) -> None:
    """Check that a resumed run takes the steps of one that was never stopped.

    It has taken ``other`` steps before it loads, whose state the checkpoint replaces.
    """
    straight, resumed = make(), make()
    straight.run(0, at)
    straight.accelerator.save_state(folder)
    straight.run(at, last)
    resumed.run(20, 20 + other)
    resumed.accelerator.load_state(folder)
    resumed.run(at, last)
    check_same_bits(resumed.outer(), straight.outer())
    check_same_bits(resumed.own(), straight.own())
    straight.close()
    resumed.close()
