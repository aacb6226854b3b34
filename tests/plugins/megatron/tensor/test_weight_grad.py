"""Backward in two halves: layers that are divided over ranks leave weights' gradients, too."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from drivetrain_megatron.pipeline.runner import seeded
from drivetrain_megatron.plan.divide import BlockPlan, GroupPlan, divide
from drivetrain_megatron.plan.trial import run_emulated
from drivetrain_megatron.tensor.behavior import behavior_of
from drivetrain_megatron.tensor.linear import (
    WeightGradients,
    WeightHalf,
    defer_no_more,
    defer_weights,
)
from drivetrain_megatron.tensor.operators import Edges, TokenShards
from drivetrain_megatron.tensor.partition import even, packed
from stacks import Parts

EXACT, ROUNDED = {"rtol": 1e-10, "atol": 1e-12}, {"rtol": 0.1, "atol": 2.0}
WIDTH, INNER, TOKENS = 6, 8, 5


def block():
    """Return layers by columns in a group, in a packed matrix, by rows, and one that is whole."""

    def compute(m, x):
        x = x + m.down(m.gate(x).tanh() * m.up(x))
        first, second = m.packed(x).chunk(2, -1)
        return m.whole(x + m.out(first.tanh() * second))

    gate, up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER, bias=False)
    packed, out = Conv1D(2 * INNER, WIDTH), Conv1D(WIDTH, INNER)
    whole, down = nn.Linear(WIDTH, WIDTH), nn.Linear(INNER, WIDTH)
    return Parts(compute, gate=gate, up=up, down=down, packed=packed, out=out, whole=whole)


def plan():
    by = even(0, INNER, 2)
    parts = packed(0, (INNER, INNER), 2)
    return BlockPlan(
        (GroupPlan({"gate": by, "up": by}, "down", by), GroupPlan({"packed": parts}, "out", by))
    )


def check(sharded=False, frozen=(), autocast=False):
    torch.manual_seed(2)
    whole = block() if autocast else block().double()
    for name in frozen:
        whole.get_parameter(name).requires_grad_(False)
    dtype = torch.float32 if autocast else torch.float64
    close = partial(torch.testing.assert_close, **(ROUNDED if autocast else EXACT))
    x = torch.randn(2, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    by_tokens = even(-2, TOKENS, 2)
    rounded = partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)
    for factor in (1, 2):  # two micro-batches
        with rounded():
            out = whole(x * factor)
        out.to(dtype).square().sum().backward()
    layers = [name for name, each in whole.named_modules() if isinstance(each, nn.Linear | Conv1D)]

    def body(ranks):
        block, tokens = copy.deepcopy(whole), TokenShards() if sharded else None
        if tokens is not None:
            tokens.begin(TOKENS)
        block.zero_grad()
        facts = divide(block, plan(), Edges(ranks, tokens))
        gradients = WeightGradients()
        deferring = defer_weights(block, gradients)
        assert len(deferring) == len(layers)
        own = (by_tokens.take(x, ranks.rank) if sharded else x).detach().requires_grad_()
        for factor in (1, 2):
            with gradients.collecting(factor), rounded():
                block(own * factor).to(dtype).square().sum().backward()
        weights = [block.get_submodule(name).weight for name in layers]
        assert all(weight.grad is None for weight in weights)
        close(own.grad, by_tokens.take(x.grad, ranks.rank) if sharded else x.grad)
        sent = ranks.traffic.total()
        for factor in (1, 2):
            torch.autograd.backward(gradients.roots(factor))
        assert ranks.traffic.total() == sent
        for name, parameter in block.named_parameters():
            expected, partition = whole.get_parameter(name).grad, facts[name].partition
            if partition is not None and expected is not None:
                expected = partition.take(expected, ranks.rank)
            if sharded and partition is None:  # each rank has the part of its tokens
                ranks.all_reduce(parameter.grad).wait()
            close(parameter.grad, expected)
        defer_no_more(deferring)
        assert behavior_of(block.whole) is None
        with gradients.collecting(3):
            block(own).sum().backward()
        assert gradients.roots(3) == []

    run_emulated(2, body)


def test_divided_layers_leave_their_weights_gradients():
    for sharded, frozen in itertools.product((False, True), ((), ("up.weight", "out.weight"))):
        check(sharded, frozen)
    check(autocast=True)


def test_one_gradient_at_a_time():
    """A layer's gradient is its parameter's before the next is computed, and is not copied."""
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    gradients = WeightGradients()
    defer_weights(layers, gradients)
    with gradients.collecting(0):
        layers(torch.randn(2, 4)).sum().backward()
    seen = []
    compute = WeightHalf.compute

    def watched(half):
        found = compute(half)
        done = [layer.weight.grad is not None for layer in layers]
        seen.append((sum(done), found[0].data_ptr()))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightHalf, "compute", watched)
        roots = gradients.roots(0)
        seeded(roots, [torch.ones_like(root) for root in roots], torch.device("cpu")).backward()
    assert [done for done, _ in seen] == [0, 1, 2]
    assert {layer.weight.grad.data_ptr() for layer in layers} == {place for _, place in seen}
