"""Tensor parallelism of whole models: losses, gradients and steps equal those of one process."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from huggingface_models import ARCHITECTURES, VOCABULARY, logits_of, token_batch

ROOT = Path(__file__).parents[3]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def example_gpt(layers=2):
    """Return the GPT of the example as it stands."""
    path = ROOT / "examples/train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(48, layers, 6, 32).double()


MODELS = {**ARCHITECTURES, "example": example_gpt}


def build(name, **options):
    torch.manual_seed(0)
    return MODELS[name](**options)


def loss_of(model, ids):
    logits = logits_of(model(ids))
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))


def check_gradients(accelerator, model, twin):
    """Compare this rank's part of every gradient with the twin's."""
    facts = accelerator.strategy_of(model)._facts
    rank = accelerator.mesh["tp"].rank
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        whole = theirs[name].grad
        assert (whole is None) == (parameter.grad is None), name
        if whole is not None:
            partition = facts[name].partition
            expected = whole if partition is None else partition.take(whole, rank)
            torch.testing.assert_close(
                parameter.grad, expected, **EXACT, msg=lambda m, name=name: f"{name} {m}"
            )


def check_training(name, steps=3, **options):
    model = build(name)
    twin = copy.deepcopy(model)
    accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    dp = accelerator.mesh["dp"]
    for step in range(steps):
        loss = loss_of(model, token_batch(dp.size * step + dp.rank))
        accelerator.backward(loss)
        losses = [loss_of(twin, token_batch(dp.size * step + rank)) for rank in range(dp.size)]
        sum(losses).div(dp.size).backward()
        torch.testing.assert_close(loss.detach(), losses[dp.rank].detach(), **EXACT)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        theirs = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        torch.testing.assert_close(norm, theirs, **EXACT)
        if not options.get("data_parallel"):
            check_gradients(accelerator, model, twin)
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        other.zero_grad()
    with accelerator.gathered(model):
        for (key, mine), whole in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, whole, **EXACT, msg=lambda m, key=key: f"{key} {m}")
    accelerator.free_memory()


EACH = pytest.mark.parametrize("name", list(MODELS))
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])


@EACH
@SEQUENCE
@pytest.mark.ranks(2)
def test_two_ranks(name, sequence_parallel):
    check_training(name, tp=2, sequence_parallel=sequence_parallel)


@EACH
@SEQUENCE
@pytest.mark.ranks(4)
def test_four_ranks(name, sequence_parallel):
    check_training(name, tp=4, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
@pytest.mark.ranks(4)
def test_over_data_parallel_ranks(name, inner):
    check_training(name, tp=2, data_parallel={"name": inner})


def test_vocabulary_is_no_multiple_of_ranks():
    assert VOCABULARY % 2
    assert VOCABULARY % 3
