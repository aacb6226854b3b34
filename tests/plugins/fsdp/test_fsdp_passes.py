"""Compiled blocks under fsdp: the conformance suite compiles whole models.

tests/plugins/zero trains recomputed blocks, test_fsdp_ties counts how many live at once.
"""

import functools

import pytest
import torch

from drivetrain.model.modules import clean_name
from drivetrain.testing.conformance.suite import Twins, weights
from drivetrain.testing.models import Case
from stacks import Tower
from zero_stages import start

FULL = {"name": "fsdp"}
GRAD = {"name": "fsdp", "sharding": "grad"}
TOWER = Case("tower", functools.partial(Tower, 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [FULL, GRAD], ids=["full", "grad"])
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_blocks(strategy):
    """By the user before prepare or after it: as eager, and no graph is made after two steps."""
    accelerator = start(strategy)
    twins = Twins(accelerator, TOWER, wrap=None if strategy == FULL else compiled)
    if strategy == FULL:
        for block in twins.model.blocks:
            block.compile(backend="aot_eager")
    graphs = []
    for step in range(4):
        twins.backward(step)
        twins.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[1] == graphs[3]
    for name, tensor in weights(accelerator, twins.model).items():
        expected = twins.twin.get_parameter(clean_name(name)).detach()
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-10)
    shown = [clean_name(name) for name in accelerator.get_state_dict(twins.model)]
    assert shown == list(twins.twin.state_dict())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    return model
