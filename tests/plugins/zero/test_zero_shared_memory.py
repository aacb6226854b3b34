"""Parameters under ZeRO that lie in each other's memory, or nearly so.

One process updates both of them by a step of one. Units hold copies, which would part.
"""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.twins import Twins, adamw
from drivetrain.testing.models import OUT, WIDTH, Case, linear
from zero_stages import each, start, train


class Shared(nn.Module):
    """A second layer whose weight is another parameter in the memory of the first one's."""

    def __init__(self):
        super().__init__()
        self.one, self.two = linear(WIDTH, OUT), linear(WIDTH, OUT)
        self.two.weight = nn.Parameter(self.one.weight.data)

    def forward(self, inputs):
        return self.one(inputs) + self.two(inputs).sin()


class Crossing(Shared):
    """Two ranges of one tensor that have a row in common."""

    def __init__(self):
        super().__init__()
        rows = torch.randn(2 * OUT - 1, WIDTH, dtype=torch.float64)
        self.one.weight = nn.Parameter(rows[:OUT])
        self.two.weight = nn.Parameter(rows[OUT - 1 :])


class Watching(Shared):
    """A buffer that shows a parameter's values."""

    def __init__(self):
        super().__init__()
        self.two = linear(WIDTH, OUT)
        self.two.register_buffer("weight_of_one", self.one.weight.data[1:])


class Expanded(Shared):
    """A trained bias with one number in memory."""

    def __init__(self):
        super().__init__()
        self.two = linear(WIDTH, OUT)
        self.two.bias = nn.Parameter(torch.ones(1, dtype=torch.float64).expand(OUT))


class Halves(Shared):
    """Columns of one tensor in turn, and its last rows: near each other, but apart."""

    def __init__(self):
        super().__init__()
        both = torch.randn(OUT + 2, 2 * WIDTH, dtype=torch.float64)
        self.one.weight = nn.Parameter(both[:OUT, ::2])
        self.two.weight = nn.Parameter(both[:OUT, 1::2])
        self.rest = nn.Parameter(both[OUT:])


@each("zero1", "zero3", "sharded")
@pytest.mark.ranks(2)
def test_shared_memory_is_refused(strategy):
    """It would part without a word; frozen parameters may share theirs, and neighbors are fine."""
    for factory, found in (
        (Shared, "'one.weight' and 'two.weight'"),
        (Crossing, "'one.weight' and 'two.weight'"),
        (Watching, "'one.weight' and 'two.weight_of_one'"),
        (Expanded, "'two.bias', which is expanded"),
    ):
        accelerator = start(strategy)
        model = factory()
        with pytest.raises(UsageError, match=found):
            accelerator.prepare(model, AdamW(model.parameters()))
        accelerator.prepare(factory().requires_grad_(False))
        accelerator.free_memory()
    accelerator = start(strategy)
    train(Twins(accelerator, Case("halves", Halves), adamw), range(2))
    accelerator.free_memory()
