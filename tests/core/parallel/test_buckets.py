"""Flat buckets: how parameters are grouped, and that views keep shapes and strides."""

import torch
from torch import nn

from drivetrain.parallel.replicated import Bucket, plan_buckets, view_like
from drivetrain.shards import is_dense

CPU = torch.device("cpu")


def plan(sizes, *, limit, first, dtypes=None):
    kinds = [(dtype, CPU) for dtype in dtypes or [torch.float32] * len(sizes)]
    shapes, order = [(size,) for size in sizes], list(range(len(sizes)))
    return plan_buckets(shapes, kinds, order, bucket_bytes=limit, first_bytes=first)


def members(layouts):
    return [layout.members for layout in layouts]


def test_a_bucket_is_closed_before_it_exceeds_its_limit():
    assert members(plan([2, 2, 2, 2, 2], limit=16, first=8)) == [(0,), (1, 2), (3, 4)]
    assert members(plan([1, 1, 2, 2, 2], limit=16, first=8)) == [(0, 1), (2, 3), (4,)]
    # A parameter larger than the limit is alone.
    assert members(plan([1, 100, 1, 1], limit=16, first=8)) == [(0,), (1,), (2, 3)]


def test_dtypes_are_kept_apart_in_the_order_of_completion():
    half, full = torch.bfloat16, torch.float32
    layouts = plan([1, 1, 1, 1], limit=64, first=64, dtypes=[full, half, half, full])
    assert members(layouts) == [(1, 2), (0, 3)]
    assert [layout.dtype for layout in layouts] == [half, full]
    assert [layout.nbytes for layout in layouts] == [8, 16]  # each with a tail of two


def test_views_have_shape_strides_and_memory_of_the_bucket():
    parameters = [
        nn.Parameter(torch.tensor(3.0)),
        nn.Parameter(torch.empty(0, 4)),
        nn.Parameter(torch.randn(3, 5).t()),
        nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(4, 1).expand(4, 6)),
    ]
    shapes = [tuple(parameter.shape) for parameter in parameters]
    limits = {"bucket_bytes": 1 << 20, "first_bytes": 1 << 20}
    (layout,) = plan_buckets(shapes, [(torch.float32, CPU)] * 5, range(5), **limits)
    bucket = Bucket(layout, parameters, [f"p{i}" for i in range(len(parameters))])
    for parameter, view in zip(parameters, bucket.views, strict=True):
        assert view.shape == parameter.shape
        assert is_dense(view)
        if is_dense(parameter):
            assert view.stride() == parameter.stride()
        view.fill_(1)
    assert bucket.flat.sum() == bucket.flat.numel() - 5  # all but the tail, each once
    assert bucket.flags.numel() == 5
    bucket.flags.fill_(1)
    assert bucket.flat.eq(1).all()


def test_dense_means_a_block_of_memory():
    assert is_dense(torch.empty(3, 4))
    assert is_dense(torch.empty(3, 4).t())
    assert is_dense(torch.empty(3, 1, 4).transpose(0, 2))
    assert not is_dense(torch.empty(3, 4)[:, ::2])
    assert not is_dense(torch.empty(1).expand(3))
    view = view_like(torch.arange(10.0), 2, torch.empty(2, 3).t())
    assert view.tolist() == [[2, 5], [3, 6], [4, 7]]
