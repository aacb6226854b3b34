"""Models built without memory under tensor parallelism: each rank gets its share, and no more."""

import copy

import pytest
import torch
import torch.nn.functional as F

from drivetrain import Accelerator
from huggingface_models import ARCHITECTURES, VOCABULARY, logits_of, token_batch

EXACT = {"rtol": 1e-10, "atol": 1e-12}
INNER = pytest.mark.parametrize("inner", ["ddp", "zero1", "zero3", "fsdp"])


def build(name):
    torch.manual_seed(7)
    return ARCHITECTURES[name]()


def accelerator_of(inner, tp=2):
    return Accelerator(
        strategy={"name": "megatron", "tp": tp, "data_parallel": {"name": inner}}, cpu=True
    )


def prepared(accelerator, model):
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def train(accelerator, model, optimizer, steps=2):
    for step in range(steps):
        ids = token_batch(step)
        loss = F.cross_entropy(logits_of(model(ids)).view(-1, VOCABULARY), ids.view(-1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@INNER
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "llama-mqa", "encoder"])
@pytest.mark.ranks(2)
def test_built_values_are_those_of_construction(name, inner):
    """Bit for bit, before training and after it."""
    expected = {key: value.clone() for key, value in build(name).state_dict().items()}
    ordinary = accelerator_of(inner)
    trained = train(ordinary, *prepared(ordinary, build(name)))
    ordinary.free_memory()
    accelerator = accelerator_of(inner)
    with accelerator.building():
        model = build(name)
    model, optimizer = prepared(accelerator, model)
    found = accelerator.get_state_dict(model)
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    for key, tensor in train(accelerator, model, optimizer).items():
        assert torch.equal(tensor, trained[key]), key
    accelerator.free_memory()


@INNER
@pytest.mark.ranks(4)
def test_over_data_parallel_ranks(inner):
    expected = build("gpt2").state_dict()
    accelerator = accelerator_of(inner)
    with accelerator.building():
        model = build("gpt2")
    model, _ = prepared(accelerator, model)
    for key, tensor in accelerator.get_state_dict(model).items():
        assert torch.equal(tensor, expected[key]), key
    accelerator.free_memory()


@pytest.mark.parametrize("inner", ["ddp", "zero3", "fsdp"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
@pytest.mark.ranks(2)
def test_values_stream_from_an_export(tmp_path, name, inner):
    """Written by two ranks, read by two that construct with other random numbers."""
    first = accelerator_of("ddp")
    model, optimizer = prepared(first, build(name))
    weights = train(first, model, optimizer)
    first.save_model(model, tmp_path, max_shard_size="20KB")
    first.free_memory()
    accelerator = accelerator_of(inner)
    with accelerator.building(weights=tmp_path):
        torch.manual_seed(99)
        model = ARCHITECTURES[name]()
    model, _ = prepared(accelerator, model)
    for key, tensor in accelerator.get_state_dict(model).items():
        assert torch.equal(tensor, weights[key]), key
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_state_of_an_optimizer_is_cut_too():
    """Adagrad makes its state in its constructor, where parameters have no values yet."""
    model = build("llama")
    twin = copy.deepcopy(model)
    other = torch.optim.Adagrad(twin.parameters(), lr=0.01, initial_accumulator_value=0.1)
    accelerator = accelerator_of("ddp")
    with accelerator.building():
        model = build("llama")
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = train(accelerator, model, optimizer)
    for step in range(2):
        ids = token_batch(step)
        F.cross_entropy(twin(ids).logits.view(-1, VOCABULARY), ids.view(-1)).backward()
        other.step()
        other.zero_grad()
    for key, tensor in twin.state_dict().items():
        torch.testing.assert_close(
            found[key], tensor, **EXACT, msg=lambda m, key=key: f"{key}: {m}"
        )
    accelerator.free_memory()
