"""Tensor parallelism of whole models: losses, gradients and steps equal those of one process."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 97, "intermediate_size": 40,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config, **options))


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 97, (2, 7), generator=generator)


def strategy(**options):
    return {"name": "megatron", **options}


def whole_gradients(accelerator, model):
    """Return every gradient as the whole model has it, through the strategy's own coordinates."""
    inner = accelerator.strategy_of(model)
    return {
        name: (parameter.grad, inner._facts[name]) for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.ranks(2)
def test_llama(sequence_parallel):
    torch.manual_seed(0)
    model = llama().double()
    twin = copy.deepcopy(model)
    accelerator = Accelerator(
        strategy=strategy(tp=2, sequence_parallel=sequence_parallel), cpu=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        ids = tokens(step)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        expected = twin(input_ids=ids, labels=ids).loss
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        theirs = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        torch.testing.assert_close(norm, theirs, rtol=1e-6, atol=0)
        rank = accelerator.mesh["tp"].rank
        mine = dict(twin.named_parameters())
        for name, (gradient, facts) in whole_gradients(accelerator, model).items():
            whole = mine[name].grad
            expected_part = whole if facts.partition is None else facts.partition.take(whole, rank)
            torch.testing.assert_close(gradient, expected_part, rtol=1e-5, atol=1e-9)
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        other.zero_grad()
    accelerator.free_memory()
