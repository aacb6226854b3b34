"""Embeddings cut by words: lookups, gradients, padding, words that do not exist."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigError, UsageError
from drivetrain_megatron.plan.thread_ranks import run_emulated
from drivetrain_megatron.tensor.operators import Edges, TokenShards, gather
from drivetrain_megatron.tensor.partition import even, packed
from drivetrain_megatron.tensor.vocabulary import attach_vocabulary
from emulated_tensors import calls, close

HIDDEN, TOKENS = 6, 7


def example(vocabulary, padding):
    torch.manual_seed(0)
    module = nn.Embedding(vocabulary, HIDDEN, padding_idx=padding).double()
    words = torch.randint(0, vocabulary, (2, TOKENS))
    words[0, :2] = 0
    if padding is not None:
        words[1, 3] = module.padding_idx
    return module, words


def attached(module, size, ranks, tokens=None):
    """Return a divided copy and how to cut the whole weight's gradient."""
    module = copy.deepcopy(module)
    edges = Edges(ranks, tokens)
    partition = even(0, module.num_embeddings, size)
    attach_vocabulary(module, edges, partition)
    module.weight.data = partition.take(module.weight.data, ranks.rank)
    return module, partition


def check_lookups(size, vocabulary, padding):
    whole, words = example(vocabulary, padding)
    expected = whole(words)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    def body(ranks):
        module, partition = attached(whole, size, ranks)
        out = module(words)
        close(out, expected)
        assert out.requires_grad
        out.backward(grad)
        close(module.weight.grad, partition.take(whole.weight.grad, ranks.rank))
        assert calls(ranks) == {"all_reduce": 1}
        return ranks.traffic.total()

    sent = sum(run_emulated(size, body))
    assert sent == 2 * expected.numel() * 8 * (size - 1)


def test_lookups_equal_one_process():
    for vocabulary, padding in ((97, None), (97, 96), (97, 50), (3, -1)):
        check_lookups(4, vocabulary, padding)


def test_shards_of_the_sequence():
    whole, words = example(97, 5)
    expected = whole(words)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    shards = even(-2, TOKENS, 4)

    def body(ranks):
        tokens = TokenShards()
        module, partition = attached(whole, 4, ranks, tokens)
        with tokens.of(TOKENS):
            out = module(words)
        close(out, shards.take(expected, ranks.rank))
        out.backward(shards.take(grad, ranks.rank))
        close(module.weight.grad, partition.take(whole.weight.grad, ranks.rank))
        close(gather(out, ranks, shards), expected)

    run_emulated(4, body)


def test_what_cannot_be_looked_up_or_divided_is_refused():
    whole, words = example(97, None)

    def body(ranks):
        module, _ = attached(whole, 2, ranks)
        for wrong in (97, -1):
            with pytest.raises(UsageError, match=rf"words from 0 to 96, found .* {wrong}"):
                module(torch.tensor([wrong]))
        assert module(words[:, :0]).shape == (2, 0, HIDDEN)
        for other, partition, match in (
            (nn.Embedding(8, 4, max_norm=1.0), even(0, 8, 2), "without max_norm"),
            (nn.Embedding(8, 4, scale_grad_by_freq=True), even(0, 8, 2), "without scale_grad_by"),
            (nn.Embedding(8, 4, sparse=True), even(0, 8, 2), "without sparse"),
            (nn.EmbeddingBag(8, 4), even(0, 8, 2), "leave it out of the plan"),
            (nn.Embedding(8, 4), packed(0, (4, 4), 2), "one range per rank"),
        ):
            with pytest.raises(ConfigError, match=match):
                attach_vocabulary(other, Edges(ranks), partition)

    run_emulated(2, body)
