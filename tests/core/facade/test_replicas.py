"""Ranks must hold the same optimizers and schedules, and replicas that stay equal."""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, CollectiveError, RankMismatchError


def start(strategy, **config):
    accelerator = Accelerator(cpu=True, config={"strategy": strategy, **config})
    torch.manual_seed(0)
    return accelerator, nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(kind, model, odd):
    parameters, rate = list(model.parameters()), 0.1
    if not odd:
        return torch.optim.AdamW(parameters, lr=rate)
    if kind == "missing":
        parameters = parameters[:2]
    if kind == "order":
        parameters.reverse()
    kinds = {"class": torch.optim.SGD}
    return kinds.get(kind, torch.optim.AdamW)(parameters, lr=2 * rate if kind == "lr" else rate)


SAID = {
    "class": "'optimizer 0 of class AdamW', rank 1 has 'optimizer 0 of class SGD'",
    "lr": "'optimizer 0, group 0: lr = 0.1', rank 1 has 'optimizer 0, group 0: lr = 0.2'",
    "missing": "'optimizer 0, group 0: 2.weight', rank 1 has 'nothing'",
    "order": "'optimizer 0, group 0: 0.weight', rank 1 has 'optimizer 0, group 0: 2.bias'",
    "activation": "'module 1 of class ReLU', rank 1 has 'module 1 of class GELU'",
    "scheduler": "'scheduler: step_size = 1', rank 1 has 'scheduler: step_size = 2'",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_ranks_that_train_otherwise_are_refused(strategy):
    for kind, said in SAID.items():
        accelerator, model = start(strategy)
        odd = accelerator.process_index == 1
        if kind == "activation" and odd:
            model[1] = nn.GELU()
        optimizer = optimizer_of(kind, model, odd)
        step_size = 2 if kind == "scheduler" and odd else 1
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size)
        with pytest.raises(RankMismatchError) as caught:
            accelerator.prepare(model, optimizer, scheduler)
        assert said in str(caught.value)
        accelerator.free_memory()
    accelerator, model = start(strategy)
    model = accelerator.prepare(model)
    with pytest.raises(RankMismatchError, match="disagree on an optimizer: .*lr = 0.1"):
        accelerator.prepare(optimizer_of("lr", model, odd))  # comes later
    accelerator.free_memory()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.ranks(2)
def test_a_schedule_by_a_loss_of_each_rank_is_refused_at_the_next_collective(strategy):
    """Divided weights would go on with two learning rates, and no comparison finds that."""
    accelerator, model = start(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    with pytest.raises(CollectiveError, match=r"learning rates of the step before .*metric_mean"):
        for loss in range(4):
            step(accelerator, model, optimizer)
            schedule.step(-loss * accelerator.process_index)  # rank 1 improves
    accelerator.free_memory()


@pytest.mark.parametrize("what", ["model", "part", "optimizer"])
@pytest.mark.parametrize("strategy", ["ddp", {"name": "megatron", "pp": 2}])
@pytest.mark.ranks(2)
def test_a_state_dict_that_one_rank_alone_loads_is_refused_at_the_next_collective(strategy, what):
    accelerator, model = start(strategy)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loads = {"model": model, "part": model[0], "optimizer": optimizer}[what]
    step(accelerator, model, optimizer)
    state = loads.state_dict()
    with pytest.raises(CollectiveError, match=r"state dict|failed on rank"):
        if accelerator.process_index == 0:
            loads.load_state_dict(state)
        step(accelerator, model, optimizer)
    accelerator.free_memory()


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3)])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_a_flipped_bit_of_a_replica_is_found(strategy, world):
    accelerator, model = start(strategy, check_replicas_every=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(4):
        step(accelerator, model, optimizer)
    if strategy == "ddp":
        if accelerator.process_index == 1:
            model[2].weight.data.view(torch.int32)[0, 1] ^= 1 << 3
        step(accelerator, model, optimizer)
        who = "rank 1 alone" if accelerator.num_processes > 2 else "no majority"
        with pytest.raises(RankMismatchError, match=f"after step 6, .*'2.weight': {who}"):
            step(accelerator, model, optimizer)
    accelerator.free_memory()
