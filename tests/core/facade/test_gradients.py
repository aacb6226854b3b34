"""An accumulation window's gradient is that of one large batch, whatever its length or weights."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, DataLoaderConfiguration, UsageError


def rows(n):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 5, generator=generator, dtype=torch.float64)


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def loss_of(model, x):
    return model(x).square().sum(dim=1).mean()


def reference_grad(batches):
    """The gradient of the mean of the batches' losses, in one process."""
    model = linear()
    (sum(loss_of(model, x) for x in batches) / len(batches)).backward()
    return model.weight.grad


@pytest.mark.ranks(2)
def test_weights_are_exact_over_micro_batches_and_ranks():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(linear())
    parts = rows(10).split([1, 4, 3, 2])  # two micro-batches of each rank
    for x in parts[2 * accelerator.process_index :][:2]:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x), weight=len(x))
    expected = reference_grad([rows(10)])  # one batch of all rows
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("backwards", "warns"), [(1, True), (2, False), (4, False)])
def test_a_step_before_a_window_without_accumulate_is_full(backwards, warns, caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = linear()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        for _ in range(backwards):
            accelerator.backward(loss_of(model, rows(2)))
        optimizer.step()
        optimizer.zero_grad()
    said = [r for r in caplog.messages if "after 1 of the 2 backwards that accumulation: 2" in r]
    assert len(said) == warns


@pytest.mark.ranks(2)
def test_one_window_inside_of_another_is_the_same_one():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = accelerator.prepare(linear(), linear())
    parts = rows(8).split(2)
    for x in parts[2 * accelerator.process_index :][:2]:
        with accelerator.accumulate(models[0]), accelerator.accumulate(models[1]):
            for model in models:
                accelerator.backward(loss_of(model, x))
    for model in models:
        expected = reference_grad(parts)
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_model_that_has_no_part_in_the_last_micro_batch_of_a_window(strategy):
    data = rows(12)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, strategy=strategy)
    models = [linear(), linear()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    loader = DataLoader(TensorDataset(data), batch_size=2)
    *prepared, loader = accelerator.prepare(*models, *optimizers, loader)
    models, optimizers, clamped = prepared[:2], prepared[2:], []
    models[0].weight.register_hook(lambda grad: clamped.append(grad) or grad.clamp(-0.1, 0.1))
    for (x,) in loader:  # a window of both models for each batch, but for the last one's two
        for model in models:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    counted = linear()
    counted.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    alone = torch.optim.SGD(counted.parameters(), lr=0.1)
    for part, share in zip(data.split(4), (0.5, 0.5, 1.0), strict=True):
        (loss_of(counted, part) * share).backward()
        alone.step()
        alone.zero_grad()
    for name, found in accelerator.get_state_dict(models[0]).items():
        torch.testing.assert_close(found, counted.state_dict()[name], rtol=1e-12, atol=1e-14)
    assert len(clamped) == 3


@pytest.mark.ranks(2)
def test_models_with_windows_one_after_the_other_keep_what_others_left():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = accelerator.prepare(linear(), linear())
    data = rows(12)
    loader = accelerator.prepare(DataLoader(TensorDataset(data), batch_size=2))
    for (x,) in loader:
        for model in models:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x))
    expected = sum(
        reference_grad([part]) * w for part, w in zip(data.split(4), (0.5, 0.5, 1), strict=True)
    )
    for model in models:
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_gradients_that_no_backward_brought_must_be_alike(strategy):
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model, alone = linear(), linear()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mine = rows(8).chunk(2)[accelerator.process_index]

    def assign(reduce):
        loss, parameters = loss_of(model, mine), list(model.parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = accelerator.reduce(grad, "mean") if reduce else grad

    for _ in range(2):
        assign(reduce=True)
        optimizer.step()
    found = accelerator.get_state_dict(model)["weight"]
    assign(reduce=False)
    with pytest.raises(UsageError, match=r"others of 'weight' on other ranks, and no backward"):
        optimizer.step()
    by_hand = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        by_hand.zero_grad()
        loss_of(alone, rows(8)).backward()
        by_hand.step()
    torch.testing.assert_close(found, alone.weight.detach(), rtol=1e-12, atol=1e-14)
    accelerator.end_training()


def test_two_losses_in_the_last_micro_batch_of_a_short_window():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    data = rows(4)
    model, loader = accelerator.prepare(linear(), DataLoader(TensorDataset(data), batch_size=2))
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x))
            accelerator.backward(loss_of(model, x) * 2)
    expected = reference_grad([data[:2], data[2:]]) * 3
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_gradients_of_an_earlier_window_are_not_divided_again(strategy):
    data = rows(12)
    of = [reference_grad([data[i : i + 4]]) for i in (0, 4, 8)]  # both ranks' batches
    for weighted in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, strategy=strategy)
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.detach().clone()
        loader = DataLoader(TensorDataset(data), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        weights = iter([1.0, 3.0, 5.0])
        for (x,) in loader:  # two windows, of 2 and 1 micro-batches, and one step after both
            with accelerator.accumulate(model):
                weight = next(weights)
                accelerator.backward(loss_of(model, x), weight=weight if weighted else None)
        optimizer.step()
        expected = (of[0] + 3 * of[1]) / 4 if weighted else (of[0] + of[1]) / 2
        found = before - accelerator.get_state_dict(model)["weight"]
        torch.testing.assert_close(found, expected + of[2], rtol=1e-12, atol=1e-14)
        accelerator.free_memory()


def test_gradients_that_a_script_clears_between_micro_batches_do_not_come_back():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = rows(6)
    model, loader = accelerator.prepare(linear(), DataLoader(TensorDataset(data), batch_size=1))
    for i, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            if i == 5:
                model.weight.grad = None
            accelerator.backward(loss_of(model, x), weight=1.0 + i)
    expected = reference_grad([data[5:]]) * 6 / 11  # of the window's weights, 5 and 6
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-14)


def test_mixing_weighted_and_unweighted_losses_is_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(linear())
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, rows(2)), weight=2)
    with pytest.raises(UsageError, match="weight"), accelerator.accumulate(model):
        accelerator.backward(loss_of(model, rows(2)))


def test_a_schedule_of_n_steps_takes_n_steps_and_no_more():
    accelerator = Accelerator(cpu=True)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = {"max_lr": 0.5, "total_steps": 4}
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **schedule)
    expected = torch.optim.lr_scheduler.OneCycleLR(alone, **schedule)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        alone.step()
        expected.step()
        assert scheduler.get_last_lr() == expected.get_last_lr()
    scheduler.step()
    assert scheduler.get_last_lr() == expected.get_last_lr()


@pytest.mark.ranks(2)
def test_metrics_hold_each_sample_once_also_after_a_resume():
    even = DataLoaderConfiguration(even_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=even)
    gather = accelerator.gather_for_metrics
    rows = TensorDataset(torch.arange(11))
    loader, fresh = (accelerator.prepare(DataLoader(rows, batch_size=2)) for _ in "12")
    states, seen = zip(*[(loader.state_dict(), gather(x)) for (x,) in loader], strict=True)
    assert torch.cat(seen).tolist() == list(range(11))
    fresh.load_state_dict(states[1])
    assert torch.cat([gather(x) for (x,) in fresh]).tolist() == list(range(8, 11))
    objects = [o for (x,) in loader for o in gather([str(i) for i in x.tolist()])]
    assert objects == [str(i) for i in range(11)]
