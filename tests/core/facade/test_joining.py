"""Ranks with different numbers of batches finish together, with equal weights."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    communication,
)
from drivetrain.errors import UsageError
from drivetrain.facade.uneven import UnevenInputs
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.world import World


def run(accelerator, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    data = torch.arange(rows * 3, dtype=torch.float64).view(rows, 3) / rows
    given = (model, optimizer, scheduler, DataLoader(TensorDataset(data), batch_size=2))
    model, optimizer, scheduler, loader = accelerator.prepare(*given)
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for (x,) in loader:
            batches += 1
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model, optimizer, scheduler, batches


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.ranks(3)
def test_ranks_end_equal(window):
    """Also at one place in a window that goes on in the next loop."""
    plugin = GradientAccumulationPlugin(num_steps=window, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, optimizer, scheduler, batches = run(accelerator, rows=14)  # 7 batches on 3 ranks
    assert sorted(communication.gather_object([batches])) == [2, 2, 3]
    steps = 3 // window
    assert optimizer.steps == steps
    state = [*model.parameters(), *model.buffers()]
    state += [v for s in optimizer.state.values() for v in s.values()]
    for tensor in state:
        for other in communication.gather(tensor.detach()[None]):
            assert torch.equal(other, tensor)
    assert scheduler.get_last_lr() == pytest.approx([0.1 * 0.9**steps])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**steps)
    with accelerator.accumulate(model):
        assert accelerator.sync_gradients


def batches_of(rank, counts):
    generator = torch.Generator().manual_seed(rank)
    batches = torch.randn(counts[rank], 4, 3, generator=generator, dtype=torch.float64)
    return list(batches)


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_one_process(counts, clears):
    """Return the model after two passes; a rank without batches counts as zeros."""
    model, optimizer = made()
    for step in 2 * list(range(max(counts))):
        if clears == "first":
            optimizer.zero_grad()
        busy = [rank for rank in (0, 1) if step < counts[rank]]
        for rank in busy:
            one = model if rank == busy[0] else copy.deepcopy(model)  # whose averages count
            loss = one(batches_of(rank, counts)[step]).square().mean() / 2
            gradients = torch.autograd.grad(loss, list(one.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient + (0 if parameter.grad is None else parameter.grad)
        optimizer.step()
        if clears == "last":
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("counts", "clears"),
    [((2, 5), "first"), ((5, 2), "last"), ((3, 4), "never"), ((4, 3), "first")],
)
@pytest.mark.complete
@pytest.mark.ranks(2)
def test_steps_are_those_of_one_process(counts, clears):
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*made())
    for _ in range(2):
        with accelerator.join_uneven_inputs([model]):
            for batch in batches_of(accelerator.process_index, counts):
                if clears == "first":
                    optimizer.zero_grad()
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                if clears == "last":
                    optimizer.zero_grad()
    expected = in_one_process(counts, clears).state_dict()
    torch.testing.assert_close(model.state_dict(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, timeout=60)
def test_a_rank_without_batches_stands_in_where_a_script_has_its_own_windows():
    accelerator = Accelerator(cpu=True)
    model, optimizer = made()
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.join_uneven_inputs([model]):
        for number, x in enumerate(batches_of(accelerator.process_index, (4, 2))):
            with nullcontext() if number % 2 else accelerator.no_sync(model):
                accelerator.backward(model(x).square().mean())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    alone, by_hand = made()
    for number in range(4):
        for rank in range(2 if number < 2 else 1):
            (alone(batches_of(rank, (4, 2))[number]).square().mean() / 2).backward()
        if number % 2:
            by_hand.step()
            by_hand.zero_grad()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("step", ["of two models", "with a weight"])
@pytest.mark.ranks(2)
def test_backwards_in_which_a_rank_without_batches_has_no_part_are_refused(step):
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(3, 3), nn.Linear(3, 1))
    refused = pytest.raises(UsageError, match="in which ranks without batches can take part")
    with refused, accelerator.join_uneven_inputs([first, second]):
        for _ in range(1 + accelerator.process_index):
            inputs = torch.ones(2, 3)
            if step == "of two models":
                accelerator.backward(second(first(inputs)).sum())
            else:
                accelerator.backward(second(inputs).sum(), weight=2.0)
    accelerator.end_training()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"strategy": "zero2"}, "cannot stand in"),
        ({"gradient_accumulation_steps": 2}, "end theirs earlier"),
    ],
)
@pytest.mark.ranks(2)
def test_what_ranks_cannot_do_for_each_other_is_refused_on_each(given, why):
    accelerator = Accelerator(cpu=True, **given)
    with pytest.raises(UsageError, match=why):
        run(accelerator, rows=14)  # 7 batches
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_even_inputs_need_nothing_and_an_exception_leaves_at_once():
    even = DataLoaderConfiguration(even_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=even)
    model, _, _, batches = run(accelerator, rows=8)
    assert batches == 2
    assert accelerator.even_batches
    with pytest.raises(KeyError), accelerator.join_uneven_inputs([model]):
        raise KeyError("mine")
    accelerator.end_training()


def test_loaders_fill_up_batches_again_after_the_loop():
    loader = SimpleNamespace(even_batches=True)
    state = SimpleNamespace(loaders=[loader], scaler=SimpleNamespace(enabled=False), chosen=list)
    state.window, state.world = GradientState(1), World()
    with UnevenInputs(state).joined([], even_batches=False):
        assert not loader.even_batches
    assert loader.even_batches


def test_a_loop_that_is_over_is_known_until_another_batch_comes():
    window, one, other = GradientState(1), SimpleNamespace(rows=None), SimpleNamespace(rows=None)
    window.deliver(one, [])
    window.end(one, finished=True)
    assert window.finished is one
    window.deliver(other, [])
    assert window.finished is None
    window.end(other, finished=False)
    assert window.finished is None
