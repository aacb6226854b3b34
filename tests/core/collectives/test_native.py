"""The native communicator gives what the ring gives; here the library's operations run on gloo."""

from datetime import timedelta

import pytest
import torch

from drivetrain.collectives.native import NativeCommunicator
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from drivetrain.traffic import Traffic


def connect_native():
    world = World.discover(cpu=True)
    axis = Mesh.build({"dp": world.size}, world)["dp"]
    traffic = Traffic()
    return NativeCommunicator(axis, traffic, timedelta(seconds=20), axis.group), traffic


@pytest.mark.ranks(3)
def test_operations():
    axis, traffic = connect_native()
    size = axis.size
    ones = torch.arange(7.0).view(7, 1) + axis.rank
    handle = axis.all_reduce(ones, scale=1 / size)
    handle.wait()
    assert handle.done()
    assert ones.flatten().tolist() == pytest.approx([i + (size - 1) / 2 for i in range(7)])
    most = torch.tensor([axis.rank, -axis.rank])
    axis.all_reduce(most, reduction="max").wait()
    assert most.tolist() == [size - 1, 0]
    flat = torch.arange(4.0 * size)
    axis.reduce_scatter(flat, scale=0.5).wait()
    start, stop = axis.chunk(flat.numel())[axis.rank]
    assert flat[start:stop].tolist() == [i * size / 2 for i in range(start, stop)]
    flat = torch.full((4 * size,), float(axis.rank))
    axis.all_gather(flat).wait()
    assert flat.tolist() == [float(rank) for rank in range(size) for _ in range(4)]
    sent = torch.full((5,), axis.rank, dtype=torch.bfloat16)
    axis.broadcast(sent, source=1).wait()
    assert sent.tolist() == [1.0] * 5
    axis.all_reduce(torch.empty(0)).wait()
    axis.barrier()
    assert set(traffic.sent()) >= {("dp", "all_reduce"), ("dp", "reduce_scatter")}
    axis.close()


@pytest.mark.ranks(2)
def test_wrong_use():
    axis, _ = connect_native()
    with pytest.raises(UsageError, match="contiguous"):
        axis.all_reduce(torch.zeros(3, 2).t())
    with pytest.raises(CollectiveError, match=r"all_reduce #\d+ \(mine\) on axis 'dp'"):
        axis.all_reduce(torch.zeros(2, dtype=torch.int16), label="mine").wait()
