"""Linear layers cut by columns and by rows: equal to the whole layer, still the user's module."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from drivetrain.collectives.volume import chunk_bounds
from drivetrain.errors import ConfigError, UsageError
from drivetrain_megatron.plan.trial import run_emulated
from drivetrain_megatron.tensor.behavior import Own, attach, behavior_of, detach
from drivetrain_megatron.tensor.linear import attach_column, attach_row, enter_group
from drivetrain_megatron.tensor.operators import Edges, TokenShards, gather
from drivetrain_megatron.tensor.partition import (
    ShardingSpec,
    even,
    grouped_heads,
    joined,
    packed,
    units,
)
from emulated_tensors import calls, close, numbers

HIDDEN, FFN, TOKENS = 6, 10, 7


def layer(kind, inputs, outputs, seed):
    torch.manual_seed(seed)
    made = Conv1D(outputs, inputs) if kind == "conv1d" else None
    made = made or nn.Linear(inputs, outputs, bias=kind == "linear")
    for parameter in made.parameters():
        nn.init.normal_(parameter)  # biases too: none is zero
    return made.double()


def cut(module, partition, rank):
    """Keep a rank's outputs of a layer; return how to cut each parameter's gradient likewise."""
    cuts = {"weight": even(int(isinstance(module, Conv1D)), partition.size, partition.ranks)}
    if module.bias is not None:
        cuts["bias"] = even(0, partition.size, partition.ranks)
    for name, by in cuts.items():
        parameter = module.get_parameter(name)
        parameter.data = by.take(parameter.data, rank)
    return cuts


def x_of(seed=0):
    return numbers(2, TOKENS, HIDDEN, seed=seed)


def check_group(kind, sharded, frozen, size=2):
    whole = nn.ModuleList([layer(kind, HIDDEN, FFN, seed) for seed in range(3)])
    whole[1].weight.requires_grad_(not frozen)
    x = x_of().requires_grad_()
    grad = x_of(5).mean() * torch.ones(2, TOKENS, FFN, dtype=torch.float64)
    y = x.tanh()
    (whole[0](y) * whole[1](y) * whole[2](y) * whole[0](y * 2)).backward(grad)
    by_tokens, by_features = even(-2, TOKENS, size), even(-1, FFN, size)

    def body(ranks):
        layers = copy.deepcopy(whole)
        tokens = TokenShards() if sharded else None
        cuts = [cut(each, by_features, ranks.rank) for each in layers]
        for each in layers:
            attach_column(each, Edges(ranks, tokens, prepared=True), by_features)
        started = []
        for parameter in (layers[1].weight, layers[2].weight):  # the other one's input is changed
            if parameter.requires_grad:
                parameter.register_hook(lambda _: started.append(calls(ranks)))
        x_here = (by_tokens.take(x, ranks.rank) if sharded else x.detach().clone()).requires_grad_()
        if tokens is not None:
            tokens.begin(TOKENS)
        y = enter_group(x_here.tanh(), Edges(ranks, tokens), layers)
        out = layers[0](y) * layers[1](y) * layers[2](y) * layers[0](y * 2)
        out.backward(by_features.take(grad, ranks.rank))
        close(x_here.grad, by_tokens.take(x.grad, ranks.rank) if sharded else x.grad)
        for each, reference, by in zip(layers, whole, cuts, strict=True):
            for name, parameter in each.named_parameters():
                if parameter.requires_grad:
                    expected = reference.get_parameter(name).grad
                    close(parameter.grad, by[name].take(expected, ranks.rank))
        assert (layers[1].weight.grad is None) == frozen
        expected = {"all_gather": 1, "reduce_scatter": 1} if sharded else {"all_reduce": 1}
        assert calls(ranks) == expected
        assert started == [expected] * (1 if frozen else 2)

    run_emulated(size, body)


def test_a_group_sums_while_it_computes_gradients_of_weights():
    check_group("linear", sharded=False, frozen=False)
    check_group("conv1d", sharded=True, frozen=True)
    check_group("no bias", sharded=True, frozen=False)


def test_a_group_leaves_a_gradient_that_somebody_else_holds_alone():
    module = layer("linear", HIDDEN, FFN, 1)

    def body(ranks):
        attach_column(twin := copy.deepcopy(module), Edges(ranks, prepared=True), even(-1, FFN, 2))
        x, other = x_of().requires_grad_(), x_of().requires_grad_()
        later = other * 1  # made before, so its backward runs after the sum has started
        out = enter_group(x, Edges(ranks), [twin]) + later
        out.backward(torch.ones_like(out))  # one tensor for both
        assert torch.equal(other.grad, torch.ones_like(other))
        assert torch.equal(x.grad, 2 * torch.ones_like(x))

    run_emulated(2, body)


def test_the_module_stays_the_users():
    def body(ranks):
        for kind in ("linear", "conv1d"):
            module = layer(kind, HIDDEN, FFN, 1)
            original, text, weight = type(module), repr(module), module.weight
            seen = []
            module.register_forward_hook(lambda *_, seen=seen: seen.append(1))
            cut(module, even(-1, FFN, 2), ranks.rank)
            attach_column(module, Edges(ranks), even(-1, FFN, 2))
            assert isinstance(module, original)
            assert type(module).__name__ == original.__name__
            assert repr(module) == text
            assert module.weight is weight
            out = gather(module(x_of()), ranks, even(-1, FFN, 2))
            assert seen == [1]
            with pytest.raises(UsageError, match="detach"):
                attach_column(module, Edges(ranks), even(-1, FFN, 2))
            detach(module)
            assert type(module) is original
            assert behavior_of(module) is None
            assert "_drivetrain_tensor_parallel" not in vars(module)
            assert out.shape[-1] == FFN

    run_emulated(2, body)


def test_copies_compute_with_the_same_ranks_and_pickles_are_refused():
    whole = layer("linear", HIDDEN, FFN, 1)
    expected, by = whole(x_of()), even(-1, FFN, 2)

    def body(ranks):
        module = copy.deepcopy(whole)
        cut(module, by, ranks.rank)
        attach_column(module, Edges(ranks), by)
        twin = copy.deepcopy(nn.ModuleList([module]))[0]
        assert twin.weight is not module.weight
        assert behavior_of(twin) is behavior_of(module)
        close(gather(twin(x_of()), ranks, by), expected)
        assert copy.copy(module).weight is module.weight
        close(gather(copy.copy(module)(x_of()), ranks, by), expected)
        with pytest.raises(UsageError, match="save state_dict"):
            pickle.dumps(module)
        detach(twin)
        assert type(twin) is nn.Linear

    run_emulated(2, body)


def test_a_divided_layer_names_the_arguments_of_its_own_forward():
    """transformers asks for them: generate() refused labels, and made no attention mask."""
    module = nn.Linear(2, 2)
    attach(module, Own())
    assert list(inspect.signature(module.forward).parameters) == ["input"]


class OtherForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_other_modules_and_shards_without_a_length_are_refused():
    def body(ranks):
        for divide in (attach_column, attach_row):
            with pytest.raises(ConfigError, match="leave it out of the plan"):
                divide(OtherForward(2, 2), Edges(ranks), even(-1, 2, 2))
        module = layer("linear", HIDDEN, FFN, 1)
        attach_column(module, Edges(ranks, TokenShards()), even(-1, FFN, 2))
        with pytest.raises(UsageError, match="call the model itself"):
            module(x_of())

    run_emulated(2, body)


# --- partitions of one dim: sizes, cutting and joining, packed weights, and replicated kv heads ---


def whole_again(partition, whole):
    back = torch.full_like(whole, float("nan"))
    for rank in range(partition.ranks):
        partition.put(back, partition.take(whole, rank), rank)
    return back


def test_even_cuts_as_collectives_do():
    for size, ranks in itertools.product((0, 3, 97), (1, 4)):
        partition = even(0, size, ranks)
        assert list(partition.bounds) == chunk_bounds(size, ranks)
        assert sum(partition.local_sizes) == size
        assert partition.is_plain
        whole = torch.randn(size, 2)
        assert torch.equal(whole_again(partition, whole), whole)


def test_packed_shares_join_to_the_whole():
    for dim, ranks in itertools.product((0, -1), (1, 2, 4)):
        whole = torch.randn(18, 18)
        partition = packed(dim, (6, 6, 6), ranks, unit=2)
        assert torch.equal(whole_again(partition, whole), whole)
        assert partition.is_plain is (ranks == 1)
        for rank in range(ranks):
            share = partition.take(whole, rank)
            assert share.is_contiguous()
            assert share.size(dim) == partition.local_sizes[rank]
            assert partition.local_shape(rank, whole.shape) == tuple(share.shape)
            views = partition.views(whole, rank)
            assert torch.equal(share, torch.cat(views, dim) if views else share)


def test_take_is_a_copy_and_put_and_add_write_only_their_place():
    partition = packed(0, (4, 2), 2)
    whole = torch.arange(6.0)
    share = partition.take(whole, 1)
    assert share.tolist() == [2, 3, 5]
    share.zero_()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    partition.put(whole, share, 1)
    assert whole.tolist() == [0, 1, 0, 0, 4, 0]
    partition.put(whole, torch.ones(3), 0, add=True)
    assert whole.tolist() == [1, 2, 0, 0, 5, 0]


def test_units_are_never_cut():
    partition = units(0, 24, 4, 4)
    assert partition.local_sizes == (4, 8, 4, 8)
    assert units(0, 8, 4, 4).ranges == ((), ((0, 4),), (), ((4, 8),))


def test_q_heads_lie_with_their_kv_heads():
    kinds = ((6, 6), (6, 2), (6, 1), (8, 4), (2, 1))
    for (heads, kv_heads), ranks in itertools.product(kinds, (1, 2, 3, 4)):
        if kv_heads < ranks and ranks % kv_heads:
            with pytest.raises(ConfigError, match=rf"{ranks}; for .* take one of \[1, "):
                grouped_heads(0, heads, kv_heads, 5, ranks)
            continue
        q, kv = grouped_heads(0, heads, kv_heads, 5, ranks)
        assert (q.size, kv.size) == (5 * heads, 5 * kv_heads)
        assert sum(q.local_sizes) == q.size
        group = heads // kv_heads
        for rank in range(ranks):
            mine = [start // 5 for a, b in q.ranges[rank] for start in range(a, b, 5)]
            needed = {head // group for head in mine}
            held = {start // 5 for a, b in kv.ranges[rank] for start in range(a, b, 5)}
            assert needed == held
            # local repetition finds the right kv head: q head i uses kv head i // (q / kv)
            if held:
                assert len(mine) % len(held) == 0


def test_fused_q_k_v_of_grouped_queries_is_joined():
    q, kv = grouped_heads(0, 4, 2, 3, 4)
    fused = joined([q, kv, kv])
    assert fused.size == 24
    assert fused.ranges[2] == ((6, 9), (15, 18), (21, 24))
    assert torch.equal(whole_again(fused, torch.arange(24.0)), torch.arange(24.0))
    assert ShardingSpec((24,), fused).saves(2)
    assert fused.disown(torch.ones(9), 2).tolist() == [1] * 9
    assert fused.disown(torch.ones(9), 3).tolist() == [1] * 3 + [0] * 6


def test_a_tensor_of_another_extent_is_refused():
    partition = even(0, 5, 2)
    with pytest.raises(UsageError, match="extent 5 in dim 0"):
        partition.take(torch.zeros(6), 0)
    with pytest.raises(UsageError, match="extent 5 in dim 0"):
        partition.views(torch.zeros(6), 0)
