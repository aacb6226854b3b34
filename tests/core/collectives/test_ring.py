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

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
PIECE = 64  # bytes: small, so that small tensors have many pieces
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 129, 500]


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


def check_every_size() -> None:
    before, ring.PIECE_BYTES = ring.PIECE_BYTES, PIECE
    communicator = open_ring()
    try:
        for dtype in DTYPES:
            for numel in SIZES:
                check_all(communicator, numel, dtype)
    finally:
        communicator.close()
        ring.PIECE_BYTES = before


@pytest.mark.ranks(2)
def test_every_size_on_two_ranks():
    check_every_size()


@pytest.mark.ranks(3)
def test_every_size_on_three_ranks():
    check_every_size()


@pytest.mark.ranks(4)
def test_every_size_on_four_ranks():
    check_every_size()


def check_traffic() -> None:
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
def test_ledger_has_the_exact_bytes_on_two_ranks():
    check_traffic()


@pytest.mark.ranks(3)
def test_ledger_has_the_exact_bytes_on_three_ranks():
    check_traffic()


@pytest.mark.ranks(3)
def test_scale_shapes_and_many_handles_at_once():
    communicator = open_ring()
    generator = torch.Generator().manual_seed(communicator.rank)
    tensors = [torch.randn(index % 7 + 1, 13, generator=generator) for index in range(60)]
    expected = []
    for tensor in tensors:
        everyone = [torch.empty_like(tensor) for _ in range(communicator.size)]
        dist.all_gather(everyone, tensor)
        expected.append(torch.stack(everyone).mean(0))
    handles = [communicator.all_reduce(tensor, scale=1 / 3) for tensor in tensors]
    for handle in handles:
        handle.wait()
    for mine, theirs in zip(tensors, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        everyone = [torch.empty_like(mine) for _ in range(communicator.size)]
        dist.all_gather(everyone, mine)
        assert all(torch.equal(mine, other) for other in everyone)  # bit-identical
    communicator.barrier()
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


@pytest.mark.ranks(1)
def test_one_rank_only_scales():
    communicator = open_ring()
    tensor = torch.ones(3)
    handle = communicator.all_reduce(tensor, scale=0.5)
    handle.wait()
    assert handle.done()
    assert tensor.tolist() == [0.5] * 3
    communicator.close()


def fail_on_last_rank(timeout_s: float) -> tuple[float, str]:
    """The last rank never takes part; return what the others see, and after how long."""
    communicator = open_ring(timeout_s=timeout_s)
    communicator.barrier()
    if communicator.rank == communicator.size - 1:
        communicator.close()
        return 0.0, ""
    start = time.perf_counter()
    handle = communicator.all_reduce(torch.zeros(100_000), label="the test")
    with pytest.raises(CollectiveError) as caught:
        handle.wait()
    seconds = time.perf_counter() - start
    with pytest.raises(CollectiveError, match="broken by an earlier failure"):
        communicator.all_reduce(torch.zeros(1))
    communicator.close()
    return seconds, str(caught.value)


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_answer_is_an_error_after_the_timeout():
    seconds, message = fail_on_last_rank(timeout_s=3)
    if message:
        assert seconds > 0.5
        for fact in ("all_reduce #2", "the test", "'dp'", "rank", "of 3", "timeout of 3 s"):
            assert fact in message
    dist.barrier()  # the last rank is alive, but silent, until the others have given up
