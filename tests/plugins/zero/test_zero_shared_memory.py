"""Parameters under ZeRO that lie in each other's memory, or nearly so.

One process updates both of them by a step of one. Units hold copies, which would part.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.suite import Twins, adamw
from drivetrain.testing.models import OUT, WIDTH, Case, linear
from stacks import Parts
from zero_stages import each, start, train


def shared(model):
    """The weight of the second layer is another parameter in the memory of the first one's."""
    model.two.weight = nn.Parameter(model.one.weight.data)


def crossing(model):
    """Two ranges of one tensor that have a row in common."""
    rows = torch.randn(2 * OUT - 1, WIDTH, dtype=torch.float64)
    model.one.weight, model.two.weight = nn.Parameter(rows[:OUT]), nn.Parameter(rows[OUT - 1 :])


def watching(model):
    """A buffer shows a parameter's values."""
    model.two.register_buffer("weight_of_one", model.one.weight.data[1:])


def expanded(model):
    """A trained bias has one number in memory."""
    model.two.bias = nn.Parameter(torch.ones(1, dtype=torch.float64).expand(OUT))


def halves(model):
    """Columns of one tensor in turn, and its last rows: near each other, but apart."""
    both = torch.randn(OUT + 2, 2 * WIDTH, dtype=torch.float64)
    model.one.weight = nn.Parameter(both[:OUT, ::2])
    model.two.weight = nn.Parameter(both[:OUT, 1::2])
    model.rest = nn.Parameter(both[OUT:])


def layers(change):
    """Return the sum of two layers, changed."""
    model = Parts(
        lambda m, inputs: m.one(inputs) + m.two(inputs).sin(),
        one=linear(WIDTH, OUT),
        two=linear(WIDTH, OUT),
    )
    change(model)
    return model


@each("zero1", "zero3", "sharded")
@pytest.mark.ranks(2)
def test_shared_memory_is_refused(strategy):
    """It would part without a word; frozen parameters may share theirs, and neighbors are fine."""
    for change, found in (
        (shared, "'one.weight' and 'two.weight'"),
        (crossing, "'one.weight' and 'two.weight'"),
        (watching, "'one.weight' and 'two.weight_of_one'"),
        (expanded, "'two.bias', which is expanded"),
    ):
        accelerator = start(strategy)
        model = layers(change)
        with pytest.raises(UsageError, match=found):
            accelerator.prepare(model, AdamW(model.parameters()))
        accelerator.prepare(layers(change).requires_grad_(False))
    accelerator = start(strategy)
    train(Twins(accelerator, Case("halves", partial(layers, halves)), adamw), range(2))
