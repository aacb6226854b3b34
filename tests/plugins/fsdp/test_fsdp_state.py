"""Training state under fsdp: an optimizer's past, and exported weights.

The conformance suite covers resume bit by bit, tests/integration how training goes on under other
strategies.
"""

import copy
from collections import Counter

import pytest
import torch

from drivetrain.checkpoint.export import read_export
from drivetrain.testing.conformance.suite import adamw, everyone
from drivetrain.testing.models import CASES
from zero_stages import start

SMALL = {"name": "fsdp", "unit_from": 8}
HYBRID = {**SMALL, "sharding": "hybrid", "shard_size": 2}


def place(whole, part):
    """Return a part of a contiguous tensor as a view."""
    box = whole[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))]
    return box if part.flat is None else box.reshape(-1)[slice(*part.flat)]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(SMALL, marks=pytest.mark.ranks(3), id="full-3"),
        pytest.param(HYBRID, marks=pytest.mark.ranks(4), id="hybrid-4"),
    ],
)
def test_optimizers_with_a_past_and_exported_weights(strategy, tmp_path):
    """State from before ``prepare`` is cut like the parameters; names and bits are the user's."""
    for name in ("tied", "odd_shapes", "transposed", "adapted"):
        case = CASES[name]
        model = case.build()
        optimizer = adamw(model)
        for step in range(2):
            case.loss(model, case.batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        plain = copy.deepcopy(model)
        whole = {(key, ""): p.detach().clone() for key, p in model.named_parameters()}
        for key, parameter in model.named_parameters():
            if parameter.numel():
                for state, value in optimizer.state.get(parameter, {}).items():
                    whole[key, f"0.{state}"] = value.clone()
        accelerator = start(strategy)
        model, optimizer = accelerator.prepare(model, optimizer)
        sizes = Counter()
        for shard in accelerator.strategy_of(model).state.shards():
            key = shard.name, shard.state
            expected = place(whole[key], shard.part)
            assert shard.tensor.dtype == expected.dtype
            assert torch.equal(shard.tensor.reshape(expected.shape), expected), (name, key)
            sizes[key] += shard.tensor.numel()
        saved = sum(everyone(sizes), Counter())
        assert saved == {key: value.numel() for key, value in whole.items() if value.numel()}

        found = accelerator.get_state_dict(model)
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=0)
        accelerator.save_model(model, tmp_path / name / "export")
        alone = start("ddp")
        alone.save_model(alone.prepare(plain), tmp_path / name / "alone")
        everyone(None)
        exports = [dict(read_export(tmp_path / name / one)) for one in ("export", "alone")]
        torch.testing.assert_close(*exports, rtol=0, atol=0)
