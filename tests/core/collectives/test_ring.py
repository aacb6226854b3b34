"""The ring collectives: every size around chunk and piece boundaries, every dtype, failures."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drivetrain.collectives import Communicator, connect, ring, sent_elements
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from drivetrain.traffic import Traffic

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
PIECE = 64  # bytes: small, so that small tensors have many pieces
SIZES = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 65, 129, 500]


def open_ring(traffic: Traffic | None = None, timeout_s: float = 600) -> Communicator:
    world = World.discover(cpu=True)
    axis = Mesh.build({"dp": world.size}, world)["dp"]
    return connect(axis, traffic or Traffic(), world.device, timedelta(seconds=timeout_s))


def values(numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers: exact in every dtype, so sums can be compared bit by bit."""
    return ((torch.arange(numel) * (rank + 3) + rank) % 11).to(dtype)


def check_all(communicator: Communicator, numel: int, dtype: torch.dtype) -> None:
    size, rank = communicator.size, communicator.rank
    inputs = [values(numel, other, dtype) for other in range(size)]
    total = torch.stack(inputs).sum(0).to(dtype)
    largest = torch.stack(inputs).amax(0)
    start, stop = communicator.chunk(numel)[rank]
    summed, most, scattered = (inputs[rank].clone() for _ in range(3))
    gathered = torch.full_like(summed, -1)
    gathered[start:stop] = inputs[0][start:stop]
    copied = inputs[rank].clone()
    handles = [
        communicator.all_reduce(summed),
        communicator.all_reduce(most, reduction="max"),
        communicator.reduce_scatter(scattered),
        communicator.all_gather(gathered),
        communicator.broadcast(copied, source=size - 1),
    ]
    for handle in reversed(handles):
        handle.wait()
        assert handle.done()
    assert torch.equal(summed, total)
    assert torch.equal(most, largest)
    assert torch.equal(scattered[start:stop], total[start:stop])
    assert torch.equal(gathered, inputs[0])
    assert torch.equal(copied, inputs[size - 1])


@pytest.mark.ranks(2, 3)
def test_every_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ring, "PIECE_BYTES", PIECE)
    communicator = open_ring()
    for dtype in DTYPES:
        for numel in SIZES:
            check_all(communicator, numel, dtype)
    communicator.close()


@pytest.mark.ranks(3)
def test_ledger_has_the_exact_bytes():
    traffic = Traffic()
    communicator = open_ring(traffic)
    size, rank = communicator.size, communicator.rank
    flat = torch.ones(1001)
    communicator.all_reduce(flat).wait()
    communicator.reduce_scatter(flat).wait()
    communicator.all_gather(flat).wait()
    communicator.broadcast(flat, source=1).wait()
    expected = {}
    for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        sent = sent_elements(operation, 1001, size=size, rank=rank, source=1)
        if sent:
            expected["dp", operation] = 4 * sent
    assert traffic.sent() == expected
    sums = torch.tensor([4.0 * sent_elements("all_reduce", 1001, size=size, rank=rank)])
    communicator.all_reduce(sums).wait()
    assert sums.item() == 4 * 2 * (size - 1) * 1001  # all ranks together, whatever the rounding
    communicator.close()


@pytest.mark.ranks(2)
def test_empty_is_free_and_strided_is_refused():
    traffic = Traffic()
    communicator = open_ring(traffic)
    communicator.all_reduce(torch.empty(0)).wait()
    communicator.reduce_scatter(torch.empty(0)).wait()
    communicator.all_gather(torch.empty(0)).wait()
    assert not traffic.entries()
    with pytest.raises(UsageError, match="contiguous"):
        communicator.all_reduce(torch.ones(4, 4).t())
    with pytest.raises(UsageError, match="expected shape"):
        communicator.reduce_scatter(torch.ones(4, 4))
    communicator.close()


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_answer_is_an_error_after_the_timeout():
    communicator = open_ring(timeout_s=3)
    communicator.barrier()
    if communicator.rank != 2:
        start = time.perf_counter()
        with pytest.raises(CollectiveError) as caught:
            communicator.all_reduce(torch.zeros(100_000), label="the test").wait()
        assert time.perf_counter() - start > 0.5
        for fact in ("all_reduce #2", "the test", "'dp'", "rank", "of 3", "timeout of 3 s"):
            assert fact in str(caught.value)
        with pytest.raises(CollectiveError, match="broken by an earlier failure"):
            communicator.all_reduce(torch.zeros(1))
    dist.barrier()  # the last rank is alive, but silent, until the others have given up
    communicator.close()
