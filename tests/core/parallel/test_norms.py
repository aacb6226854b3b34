"""Global norms equal torch's, of tensors in one place and of pieces over ranks."""

import itertools
import math

import pytest
import torch
from torch import nn

from drivetrain.collectives import connect
from drivetrain.cost import Traffic
from drivetrain.errors import UsageError
from drivetrain.parallel.backward import clip_, global_norm
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World


def tensors():
    generator = torch.Generator().manual_seed(3)
    shapes = [(4, 3), (5,), (), (0, 2), (7, 2)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_norm_and_clip_are_those_of_torch():
    """A small norm leaves gradients alone."""
    # torch itself refuses the largest element of an empty tensor.
    full = [tensor for tensor in tensors() if tensor.numel()]
    for norm_type, limit in itertools.product((1.0, 2.0, 3.0, math.inf), (0.5, 1e6)):
        parameters = [nn.Parameter(torch.zeros_like(tensor)) for tensor in full]
        for parameter, gradient in zip(parameters, full, strict=True):
            parameter.grad = gradient.clone()
        mine = tensors()
        norm = global_norm(mine, norm_type)
        clip_(mine, norm, limit)
        expected = nn.utils.clip_grad_norm_(parameters, limit, norm_type)
        torch.testing.assert_close(norm, expected)
        clipped = [piece for piece in mine if piece.numel()]
        for piece, parameter in zip(clipped, parameters, strict=True):
            torch.testing.assert_close(piece, parameter.grad)


def test_dtypes_of_sums_nothing_and_nan():
    """Half precision is summed in fp32, and fp64 stays."""
    many = [torch.full((4096,), 0.25, dtype=torch.bfloat16)]
    assert global_norm(many).dtype is torch.float32
    assert global_norm(many).item() == 16.0
    mixed = [torch.ones(3, dtype=torch.float64), torch.ones(1)]
    assert global_norm(mixed).dtype is torch.float64
    assert global_norm(mixed).item() == pytest.approx(2.0, abs=1e-15)
    double = torch.ones(3, dtype=torch.float64)
    clip_([double], torch.tensor(3.0, dtype=torch.float64), 1.0)
    assert double[0].item() == pytest.approx(1 / (3 + 1e-6), rel=1e-15)
    assert global_norm([]).item() == 0
    assert global_norm([torch.tensor([math.nan, 1.0])]).isnan()
    with pytest.raises(UsageError, match="positive norm_type"):
        global_norm(tensors(), 0.0)


@pytest.mark.ranks(3)
def test_pieces_over_ranks_have_the_norm_of_the_whole():
    world = World.discover(cpu=True)
    axis = Mesh.build({"dp": world.size}, world)["dp"]
    communicator = connect(axis, Traffic(), world.device, world.timeout)
    whole = torch.cat([tensor.flatten() for tensor in tensors()])
    # The last rank holds nothing.
    pieces = [whole[:11]] if world.rank == 0 else [whole[11:]] if world.rank == 1 else []
    for norm_type in (1.0, 2.0, math.inf):
        norm = global_norm(pieces, norm_type, over=[communicator])
        expected = torch.linalg.vector_norm(whole.double(), norm_type)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    communicator.close()
