"""Collectives in levels of hosts: values, bytes between hosts, order of the levels, failures."""

import dataclasses
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drivetrain.collectives import Communicator, connect_over_hosts, ring, route_over_hosts
from drivetrain.collectives.ring import HierarchicalCommunicator
from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from flat_collectives import check_flat

pytestmark = pytest.mark.ranks(4)

PIECE = 64  # bytes: small, so that small tensors have many pieces
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 64, 129, 500]


def world_of(hosts: str, timeout_s: float = 600) -> World:
    """Return this process's world with made-up hosts, one letter per rank."""
    found = World.discover(cpu=True)
    timeout = timedelta(seconds=timeout_s)
    return dataclasses.replace(found, hosts=tuple(hosts), timeout=timeout, local_size=2)


def connected(world: World, traffic: Traffic | None = None) -> Communicator:
    mesh = Mesh.build({"dp": world.size}, world)
    return connect_over_hosts(mesh, "dp", traffic or Traffic(), world)


def test_values_of_two_hosts_with_two_ranks_each(monkeypatch):
    monkeypatch.setattr(ring, "PIECE_BYTES", PIECE)
    communicator = connected(world_of("aabb"))
    assert isinstance(communicator, HierarchicalCommunicator)
    for numel in SIZES:
        check_flat(communicator, numel)
        chunks = [(0, 0), (0, numel), (numel, numel), (numel, numel)]
        check_flat(communicator, numel, chunks=chunks)
    communicator.barrier()
    communicator.close()


def test_a_host_sends_the_least_that_is_possible():
    traffic = Traffic()
    world = world_of("aabb")
    communicator = connected(world, traffic)
    route = route_over_hosts(Mesh.plan({"dp": 4}, world), "dp", world)
    numel = 1003
    flat = torch.ones(numel)
    communicator.all_reduce(flat).wait()
    assert traffic.sent() == route.all_reduced(numel, 4)
    far = sum(nbytes for (axis, _), nbytes in traffic.sent().items() if axis == "dp.far")
    sums = torch.tensor([float(far)])
    communicator.all_reduce(sums).wait()
    # Two hosts: each sends 2 (H-1)/H = 1 tensor; one ring over both hosts sends 1.5 over each link.
    assert sums.item() == 2 * 4 * numel
    traffic.clear()
    lengths = [4 * (stop - start) for start, stop in communicator.chunk(numel)]
    communicator.reduce_scatter(flat).wait()
    communicator.all_gather(flat).wait()
    expected = route.passed("reduce_scatter", lengths) + route.passed("all_gather", lengths)
    assert traffic.sent() == expected
    communicator.close()


def test_ranks_that_do_different_things_are_told_so():
    communicator = connected(world_of("aabb"))
    tensor = torch.zeros(100)
    with pytest.raises(CollectiveError) as caught:
        if communicator.rank == 1:
            communicator.all_gather(tensor, label="mine").wait()
        else:
            communicator.reduce_scatter(tensor, label="theirs").wait()
    dist.barrier()
    said = [""] * 4
    dist.all_gather_object(said, str(caught.value))
    assert any("must run the same operations" in each and "mine" in each for each in said), said
    communicator.close()
