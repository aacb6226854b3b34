"""Communicators over all ranks, and a check of every collective on a flat tensor."""

from datetime import timedelta

import torch
from torch import Tensor

from drivetrain.collectives import Communicator, connect
from drivetrain.collectives.native import NativeCommunicator
from drivetrain.cost import Traffic
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain.runtime.world import World

TIMEOUT_S = 3600.0
"""Far beyond a test's own limit: a rank that waits for it fails its test."""


def open_axis() -> Axis:
    world = World.discover(cpu=True)
    return Mesh.build({"dp": world.size}, world)["dp"]


def open_ring(traffic: Traffic | None = None, timeout_s: float = TIMEOUT_S) -> Communicator:
    timeout = timedelta(seconds=timeout_s)
    return connect(open_axis(), traffic or Traffic(), torch.device("cpu"), timeout)


def open_native(traffic: Traffic | None = None, axis: Axis | None = None) -> NativeCommunicator:
    """Return the communicator of the library's operations, which here run on gloo."""
    axis = axis or open_axis()
    timeout = timedelta(seconds=TIMEOUT_S)
    return NativeCommunicator(axis, traffic or Traffic(), timeout, axis.group)


def values(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: exact in every dtype, so sums can be compared bit by bit."""
    return ((torch.arange(numel) * (seed + 3) + seed) % 11).to(dtype)


def check_flat(
    communicator: Communicator,
    numel: int,
    dtype: torch.dtype = torch.float32,
    chunks: list[tuple[int, int]] | None = None,
) -> None:
    """Run all collectives at once, those on parts with chosen chunks."""
    size, rank = communicator.size, communicator.rank
    inputs = [values(numel, other, dtype) for other in range(size)]
    half = {"scale": 0.5} if dtype.is_floating_point else {}
    total = torch.stack(inputs).sum(0).to(dtype) * half.get("scale", 1)
    start, stop = (chunks or communicator.chunk(numel))[rank]
    summed, most, scattered, copied = (inputs[rank].clone() for _ in range(4))
    gathered = torch.full_like(summed, -1)
    gathered[start:stop] = inputs[0][start:stop]
    handles = [
        communicator.all_reduce(summed, **half),
        communicator.all_reduce(most, reduction="max"),
        communicator.reduce_scatter(scattered, chunks=chunks, **half),
        communicator.all_gather(gathered, chunks=chunks),
        communicator.broadcast(copied, source=size - 1),
    ]
    for handle in reversed(handles):
        handle.wait()
        assert handle.done()
        handle.wait()  # does nothing more
    case = (numel, dtype, chunks)
    assert torch.equal(summed, total), case
    assert torch.equal(most, torch.stack(inputs).amax(0)), case
    assert torch.equal(scattered[start:stop], total[start:stop]), case
    assert torch.equal(gathered, inputs[0]), case
    assert torch.equal(copied, inputs[size - 1]), case
