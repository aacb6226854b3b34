"""Groups of neighbors on an axis of the mesh."""

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World


@pytest.mark.ranks(4)
def test_neighbors_share_a_group():
    world = World.discover(cpu=True)
    mesh = Mesh.build({"dp": 4}, world)
    near = mesh.start_neighbors("dp", 2, world)
    assert near is mesh.start_neighbors("dp", 2, world), "started twice"
    assert near.ranks == ((0, 1), (0, 1), (2, 3), (2, 3))[world.rank]
    assert (near.size, near.rank) == (2, world.rank % 2)
    total = torch.tensor(world.rank)
    dist.all_reduce(total, group=near.group)
    assert int(total) == (1, 1, 5, 5)[world.rank]


@pytest.mark.ranks(4)
def test_neighbors_on_an_axis_that_is_not_the_first():
    world = World.discover(cpu=True)
    mesh = Mesh.build({"tp": 2, "dp": 2}, world)
    near = mesh.start_neighbors("dp", 2, world)
    assert near.ranks == ((0, 2), (1, 3), (0, 2), (1, 3))[world.rank]


@pytest.mark.ranks(3)
def test_a_number_that_does_not_divide_is_refused():
    world = World.discover(cpu=True)
    with pytest.raises(ConfigError, match="divides the 3 ranks"):
        Mesh.build({"dp": 3}, world).neighbors("dp", 2)
