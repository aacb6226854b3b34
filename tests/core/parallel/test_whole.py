"""Optimizer state under strategies that divide it: whole everywhere, or an error within seconds.

The table of loops (tests/loops/ways/states.py) has state dicts, reads, resets and groups in fp64.
"""

import copy
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW

from drivetrain import Accelerator
from drivetrain.errors import CheckpointError, CollectiveError, UsageError
from stacks import Residual, Stack

pytestmark = pytest.mark.ranks(2)

TP = {"name": "megatron", "tp": 2}


def prepared(strategy, make=AdamW, weights=None, **options):
    """Return an Accelerator, a model with a frozen parameter and a 0-d one, and its optimizer."""
    torch.manual_seed(0)
    model = Stack([Residual(8), Residual(8)], last=nn.Linear(8, 5))
    model.scale = nn.Parameter(torch.tensor(0.5))
    model.still = nn.Parameter(torch.ones(3), requires_grad=False)
    if weights is not None:
        model.load_state_dict(weights)
    accelerator = Accelerator(strategy=strategy, cpu=True, **options)
    return accelerator, *accelerator.prepare(model, make(model.parameters()))


def train(accelerator, model, optimizer, steps):
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        accelerator.backward((model(x) * model.scale).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(found, expected):
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("one", "other", "make", "options"),
    [
        ("zero1", "fsdp", AdamW, {"mixed_precision": "bf16"}),
        ({"name": "zero3", "keep_below": 0}, "ddp", partial(SGD, lr=0.1, momentum=0.9), {}),
        ({"name": "zero2", "partition": "parameter"}, "ddp", Adafactor, {}),
        ("zero1", "ddp", partial(Adagrad, initial_accumulator_value=0.1), {}),
        ({"name": "offload", "optimizer": "cpu", "ratio": 0.5}, "zero2", AdamW, {}),
        ({"name": "local", "inner": {"name": "zero2"}, "workers": "hosts"}, "ddp", AdamW, {}),
    ],
)
def test_a_state_dict_goes_through_a_file_and_to_another_strategy(
    one, other, make, options, tmp_path
):
    """A run that loads it goes on bit by bit; another strategy has the very same state."""
    accelerator, model, optimizer = prepared(one, make, **options)
    train(accelerator, model, optimizer, range(2))
    saved, weights = optimizer.state_dict(), accelerator.get_state_dict(model)
    file = tmp_path / f"rank-{accelerator.process_index}"
    assert all(group["foreach"] is group.get("fused") is None for group in saved["param_groups"])
    torch.save(saved, file)
    train(accelerator, model, optimizer, range(2, 4))
    expected = accelerator.get_state_dict(model)
    for strategy in (one, other):
        accelerator.free_memory()
        accelerator, model, optimizer = prepared(strategy, make, weights, **options)
        loaded = torch.load(file)
        if strategy is one:  # a kernel is the choice of the run that loads
            loaded["param_groups"][0]["foreach"] = True
        optimizer.load_state_dict(loaded)
        assert optimizer.param_groups[0]["foreach"] is None
        assert_equal(optimizer.state_dict(), saved)
        if strategy is one and not options:
            train(accelerator, model, optimizer, range(2, 4))
            found = accelerator.get_state_dict(model)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    accelerator.free_memory()


@pytest.mark.parametrize("strategy", ["zero2", TP])
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(strategy):
    accelerator, model, optimizer = prepared(strategy)
    train(accelerator, model, optimizer, range(1))
    saved = optimizer.state_dict()
    other = copy.deepcopy(saved)
    other["param_groups"][0]["params"].pop()
    with pytest.raises(UsageError, match=r"1 groups of \[\d+\] parameters, found 1 groups"):
        optimizer.load_state_dict(other)
    other = copy.deepcopy(saved)
    number = next(n for n, each in saved["state"].items() if each["exp_avg"].dim() == 2)
    other["state"][number]["exp_avg"] = torch.ones(5, 5)
    with pytest.raises(CheckpointError, match=r"found \(5, 5\)"):
        optimizer.load_state_dict(other)
    other = copy.deepcopy(saved)
    if accelerator.is_main_process:
        other["state"].pop(number)
    with pytest.raises(CheckpointError, match="ranks disagree on the state"):
        optimizer.load_state_dict(other)
    assert_equal(optimizer.state_dict(), saved)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    with pytest.raises(UsageError, match=r"optimizer.state\[p\] = state"):
        state["exp_avg"][0] = 1.0
    with pytest.raises(UsageError, match=r"optimizer.state\[p\] = state"):
        state["exp_avg"] = torch.ones(1)
    with pytest.raises(UsageError, match="add_param_group"):
        optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UsageError, match="add_param_group"):
        optimizer.param_groups = []
    with pytest.raises(UsageError, match="that no group"):
        optimizer.add_param_group({"params": [model.scale]})
    with pytest.raises(UsageError, match=r"what prepare\(\) returned"):
        optimizer.optimizer.state_dict()
    optimizer.optimizer.first_step = optimizer.step  # as a sharpness-aware one has
    with pytest.raises(AttributeError, match="found 'first_step' of AdamW"):
        optimizer.first_step()
    with pytest.raises(AttributeError, match="has no attribute 'second_step'"):
        optimizer.second_step()
    accelerator.free_memory()


@pytest.mark.parametrize("what", ["dict", "read", "change"])
def test_a_rank_that_asks_alone_learns_it_soon(what):
    accelerator, model, optimizer = prepared("zero2")
    train(accelerator, model, optimizer, range(1))
    parameter = next(model.parameters())
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"save_state\(\)") as caught:
        if accelerator.is_main_process:
            if what == "dict":
                optimizer.state_dict()
            elif what == "read":
                optimizer.state[parameter]["exp_avg"].norm()
            else:
                optimizer.state[parameter] = {}
        train(accelerator, model, optimizer, range(1, 3))
    assert "optimizer.state" in str(caught.value)
    assert time.monotonic() - began < 10
    accelerator.free_memory()
