"""Writes into parameters beside masters: the masters follow, however the script writes.

Elements that nobody wrote keep the digits that bf16 has no room for.
"""

import pytest
import torch

from drivetrain.testing.conformance.twins import momentum
from drivetrain.testing.models import CASES
from zero_stages import MASTERS, STAGES, start

BOUND = 0.0625
"""A number that bf16 has."""


def clamped(parameter):
    with torch.no_grad():
        parameter.clamp_(-BOUND, BOUND)


def clamped_data(parameter):
    parameter.data.clamp_(-BOUND, BOUND)


def other_data(parameter):
    parameter.data = parameter.data.clamp(-BOUND, BOUND)


def masters(accelerator, model):
    """Return what this rank saves of each trained parameter."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    shards = accelerator.strategy_of(model).shards()
    return {s.name: s.tensor.clone() for s in shards if s.name in trained and not s.state}


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "strategy",
    [STAGES["zero1"], {"name": "zero2", "offload": {"optimizer": "cpu"}}, {"name": "zero3"}],
    ids=["zero1", "offload", "zero3 resident"],
)
@pytest.mark.ranks(2)
def test_masters_follow_what_was_written_and_nothing_else(strategy):
    """A save in between shows what was written, and a write that is taken back changes nothing."""
    accelerator = start(strategy, **MASTERS)
    case = CASES["tied"]
    model = case.build().float()
    model, optimizer = accelerator.prepare(model, momentum(model))
    written = [p for p in model.parameters() if p.requires_grad]
    for write in (clamped, clamped_data, other_data):
        optimizer.param_groups[0]["lr"] = 0.01
        accelerator.backward(case.loss(model, case.batch(0, accelerator.process_index)))
        optimizer.step()
        before, kept = masters(accelerator, model), [p.detach().clone() for p in written]
        expected = {
            name: torch.where(v.bfloat16().abs() > BOUND, v.sign() * BOUND, v)
            for name, v in before.items()
        }
        assert any(not torch.equal(v, v.bfloat16().float()) for v in expected.values())
        for parameter in written:
            write(parameter)
        same(masters(accelerator, model), expected)
        for parameter, old in zip(written, kept, strict=True):
            parameter.data.copy_(old)
        same(masters(accelerator, model), before)
        for parameter in written:
            write(parameter)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        same(masters(accelerator, model), expected)
        optimizer.zero_grad()
    accelerator.free_memory()
