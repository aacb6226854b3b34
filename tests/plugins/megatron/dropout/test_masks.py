"""Masks that count: what they look like as random numbers, and that shards see the same."""

import itertools

import pytest
import torch

from drivetrain.errors import UsageError
from drivetrain_megatron.dropout import combine, keep_mask
from drivetrain_megatron.tensor.partition import Partition, even, packed, units

SHAPES = [(50,), (3, 7), (2, 6, 7, 5), (3, 40, 48), (2, 5, 3000), (4, 1, 1), (7, 2000)]


def shares(key, shape, partition):
    """Return what all ranks compute of a mask, put together."""
    whole = torch.zeros(shape, dtype=torch.bool)
    for rank in range(partition.ranks):
        local = partition.local_shape(rank, shape)
        partition.put(whole, keep_mask(key, local, 0.4, partition=partition, rank=rank), rank)
    return whole


def test_shards_of_any_dim_are_parts_of_the_whole():
    for shape, ranks in itertools.product(SHAPES, (2, 4)):
        whole = keep_mask(11, shape, 0.4)
        assert whole.shape == shape
        for dim, size in enumerate(shape):
            for each in (dim, dim - len(shape)):
                assert torch.equal(shares(11, shape, even(each, size, ranks)), whole)


def test_shards_of_packed_dims_and_of_units():
    whole = keep_mask(3, (5, 48), 0.4)
    assert torch.equal(shares(3, (5, 48), packed(1, (16, 16, 16), 3, unit=4)), whole)
    assert torch.equal(shares(3, (5, 48), units(-1, 48, 8, 4)), whole)


def deviations(mask, p, dim=None):
    """Return by how many standard deviations the means along a dim are off."""
    kept = mask.double()
    means = kept.mean() if dim is None else kept.mean([d for d in range(kept.dim()) if d != dim])
    count = kept.numel() / means.numel()
    return (means - (1 - p)).abs() / (p * (1 - p) / count) ** 0.5


def test_means_are_those_of_a_fair_coin():
    shape = 48, 64, 128
    for p in (0.1, 0.9):
        for key in (0, combine(1, 2)):
            mask = keep_mask(key, shape, p)
            assert deviations(mask, p) < 4.5
            for dim in range(3):
                off = deviations(mask, p, dim)
                assert off.max() < 5.0
                # Neither too uneven nor too even: means of a random coin scatter.
                assert len(off) < 50 or 0.5 < off.square().mean() < 1.6


def correlation(a, b):
    """Return the correlation of two masks times the root of their size: normal with spread 1."""
    a, b = (x.double().flatten() - x.double().mean() for x in (a, b))
    return float((a * b).mean() / (a.std() * b.std()) * a.numel() ** 0.5)


def test_neighbors_do_not_correlate():
    for p in (0.1, 0.5):
        mask = keep_mask(combine(7), (48, 64, 128), p)
        for dim, step in itertools.product(range(3), (1, 2, 3, 8, 16, 32)):
            size = mask.shape[dim] - step
            pair = mask.narrow(dim, 0, size), mask.narrow(dim, step, size)
            assert abs(correlation(*pair)) < 5.0, (dim, step)


def test_a_dim_that_is_too_long_is_refused():
    long = Partition(0, (1 << 32) + 1, (((0, 5),), ((5, (1 << 32) + 1),)))
    with pytest.raises(UsageError, match="reshape the tensor"):
        keep_mask(1, (5,), 0.5, partition=long, rank=0)


def test_alike_shards_edges_and_keys():
    twice = Partition(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))
    masks = [keep_mask(3, (2, 9), 0.5, partition=twice, rank=rank) for rank in range(4)]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])

    assert keep_mask(1, (9, 9), 0.0).all()
    assert not keep_mask(1, (9, 9), 1.0).any()
    assert keep_mask(1, (999, 99), 1 - 1e-12).sum() == 0

    keys = {combine(*numbers) for numbers in itertools.product(range(6), repeat=3)}
    assert len(keys) == 6**3
    assert combine(0) != combine(0, 0)
    assert all(0 <= key < 1 << 64 for key in keys)
