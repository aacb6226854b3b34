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
    folder: str, make: Callable[[], WorkersTraining], at: int = 6, last: int = 11
) -> None:
    """Check that a resumed run takes the steps of one that was never stopped."""
    straight, resumed = make(), make()
    straight.run(0, at)
    straight.accelerator.save_state(folder)
    straight.run(at, last)
    resumed.run(20, 21)  # other state, which the checkpoint replaces
    resumed.accelerator.load_state(folder)
    resumed.run(at, last)
    check_same_bits(resumed.outer(), straight.outer())
    check_same_bits(resumed.own(), straight.own())
    straight.close()
    resumed.close()


def goes_on_from_the_mean(
    folder: str, four: WorkersTraining, make: Callable[[], WorkersTraining]
) -> None:
    """Check that two workers go on from the mean of four, in a round of four steps."""
    four.run(0, 6)
    four.accelerator.save_state(folder)
    mean = {name: four.accelerator.reduce(value, "mean") for name, value in four.own().items()}
    two = make()
    two.accelerator.load_state(folder)
    for name, value in two.own().items():
        torch.testing.assert_close(value, mean[name], rtol=1e-12, atol=1e-12)
    check_same_bits(two.outer(), four.outer())
    two.run(6, 9)  # the round goes on: its end is step 8
    assert not torch.equal(two.outer()["last.bias"], four.outer()["last.bias"])
    four.close()
    two.close()
