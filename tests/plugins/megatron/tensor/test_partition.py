"""Partitions of one dim: sizes, cutting and joining, packed weights, and replicated kv heads."""

import itertools

import pytest
import torch

from drivetrain.collectives.volume import chunk_bounds
from drivetrain.errors import ConfigError, UsageError
from drivetrain_megatron.tensor.partition import (
    Partition,
    ShardingSpec,
    even,
    grouped_heads,
    joined,
    packed,
    units,
)


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
    with pytest.raises(ConfigError, match="24 and 5"):
        units(0, 24, 5, 2)
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


NO_CUTS = (
    (((0, 2),), ((3, 4),)),  # nobody holds 2
    (((0, 3),), ((2, 4),)),  # both hold 2, but not the same
    (((0, 4),), ((4, 4),)),  # an empty range
    (((0, 5),), ()),  # too far
    ((), ()),
)


def test_what_is_no_cut_is_refused():
    for ranges in NO_CUTS:
        with pytest.raises(UsageError, match="each of 4 indices"):
            Partition(0, 4, ranges)

    partition = even(0, 5, 2)
    with pytest.raises(UsageError, match="extent 5 in dim 0"):
        partition.take(torch.zeros(6), 0)
    with pytest.raises(UsageError, match="extent 5 in dim 0"):
        partition.views(torch.zeros(6), 0)
