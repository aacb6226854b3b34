"""Prepared objects taken apart: prepared in several calls, freed and prepared again, copied."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, Strategy, UsageError


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def rows(rank=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)) / 100


def train(accelerator, model, optimizer):
    accelerator.backward(model(rows(accelerator.process_index)).sum())
    optimizer.step()
    optimizer.zero_grad()


def test_optimizer_after_its_model_is_saved_and_loaded(tmp_path):
    def build():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(linear())
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
        return accelerator, model, optimizer

    accelerator, model, optimizer = build()
    train(accelerator, model, optimizer)
    optimizer.state[model.weight]["codes"] = torch.full((2, 4), 7, dtype=torch.uint8)
    accelerator.save_state(tmp_path / "saved")
    again, loaded, loaded_optimizer = build()
    again.load_state(tmp_path / "saved")
    expected = optimizer.state[model.weight]
    found = loaded_optimizer.state[loaded.weight]
    assert found["step"] == expected["step"] == 1
    assert torch.equal(found["exp_avg"], expected["exp_avg"])
    assert found["codes"].dtype is torch.uint8


def test_strategy_that_must_know_an_optimizer_from_the_start_says_so(monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(linear())
    kind = type(accelerator.strategy_of(model))
    monkeypatch.setattr(kind, "bind", Strategy.bind)
    with pytest.raises(UsageError, match=r"prepare\(model, optimizer\)"):
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "strategy", ["ddp", "zero1", {"name": "zero3", "keep_below": 0}, {"name": "megatron", "pp": 2}]
)
@pytest.mark.ranks(2)
def test_moved_to_its_device_it_stays_and_converted_it_is_refused(strategy):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    model.example_inputs = torch.ones(2, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for place in ("cpu", accelerator.device):
        assert model.to(place) is model.to(device=place) is model
    accelerator.backward(model(torch.ones(2, 2)).sum())
    whole = strategy in ("ddp", "zero1")
    with pytest.raises(UsageError, match=r"found bf16, as after model.half\(\)" if whole else None):
        accelerator.backward(model.bfloat16()(torch.ones(2, 2).bfloat16()).sum())
    accelerator.free_memory()
    assert "to" not in model.__dict__


@pytest.mark.ranks(2)
def test_model_prepared_again_after_free_memory():
    accelerator = Accelerator(cpu=True)
    model = linear()
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        train(accelerator, model, optimizer)
        first, second = accelerator.gather(model.weight.detach()[None])
        assert torch.equal(first, second)
        accelerator.free_memory(optimizer)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_are_ordinary_ones(copier):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = linear()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    average = copier(accelerator.unwrap_model(model))
    for parameter in average.parameters():
        torch.nn.init.zeros_(parameter)
    assert average(rows()).abs().sum() == 0
    assert model(rows()).abs().sum() > 0
    average(rows()).sum().backward()
    assert model.weight.grad is None
    assert accelerator._state.last_run is accelerator._state.models[0]
    again = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(average, None, True)
    torch.nn.init.ones_(again.weight)
    out = again(rows())
    assert torch.equal(out, out.bfloat16().float())  # computed in bf16

    train(accelerator, model, optimizer)
    scheduler.step()
    twin, schedule = copier((optimizer, scheduler))
    schedule.step()
    assert schedule.get_last_lr() == [0.25]
    assert twin.param_groups[0]["lr"] == 0.25
    assert scheduler.get_last_lr() == [0.5]
    twin.step()


def test_load_state_inside_a_window_forgets_its_gradients(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = linear()
    rate = torch.tensor(1.0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
    accelerator.save_state(tmp_path / "saved")
    with accelerator.accumulate(model):
        accelerator.backward(model(rows()).sum())
    (group,) = optimizer.param_groups
    group["foreach"] = False
    rate.zero_()
    accelerator.load_state(tmp_path / "saved")
    assert (group["lr"] is rate, rate.item(), group["foreach"]) == (True, 1.0, False)
    for last in (False, True):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows()).sum())
        assert accelerator.sync_gradients == last
    torch.testing.assert_close(model.weight.grad, rows().sum(dim=0).expand(2, 4))


def test_free_memory_lets_go_of_the_model_that_ran_last():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    gone = weakref.ref(model)
    del model
    accelerator.free_memory()
    gc.collect()
    assert gone() is None
