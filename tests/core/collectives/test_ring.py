"""Collectives on flat tensors, by the ring and by the library: sizes, dtypes, chunks, failures."""

import itertools
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from drivetrain.collectives import ring, sent_elements
from drivetrain.collectives.volume import chunk_bounds
from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from flat_collectives import check_flat, open_native, open_ring

PIECE = 64  # bytes: small, so that small tensors have many pieces
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 65, 129, 500]
LENGTHS = {
    2: [(0, 1), (1, 0), (7, 3), (0, 100), (100, 0), (16, 17), (200, 15), (5, 5)],
    3: [(0, 0, 1), (0, 9, 0), (50, 0, 0), (1, 2, 3), (0, 33, 90), (90, 33, 0), (17, 0, 64)],
}


def bounds(lengths):
    return list(itertools.pairwise([0, *itertools.accumulate(lengths)]))


def promised(communicator, numel, chunks, itemsize):
    """Return the bytes of ``check_flat``."""
    found = Counter()
    for operation in ("all_reduce", "all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        own = chunks if operation in ("reduce_scatter", "all_gather") else None
        place = {"size": communicator.size, "rank": communicator.rank, "chunks": own}
        place["source"] = communicator.size - 1
        found["dp", operation] += itemsize * sent_elements(operation, numel, **place)
    return +found


@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=pytest.mark.ranks(n, timeout=60)) for n in (2, 3)]
)
def test_every_size_dtype_and_division(monkeypatch, world):
    monkeypatch.setattr(ring, "PIECE_BYTES", PIECE)
    floats = [torch.float32, torch.bfloat16, torch.float16]
    for opened, dtypes, sizes in (
        (open_ring, [*floats, torch.int64], SIZES),
        (open_native, [torch.float32, torch.int32], [0, 4, 7, 500]),
    ):
        traffic = Traffic()
        communicator = opened(traffic)
        cases = [(numel, dtype, None) for numel in sizes for dtype in dtypes]
        cases += [(sum(each), torch.float32, bounds(each)) for each in LENGTHS[communicator.size]]
        for numel, dtype, chunks in cases:
            traffic.clear()
            check_flat(communicator, numel, dtype, chunks)
            sent = promised(communicator, numel, chunks, dtype.itemsize)
            assert traffic.sent() == sent, (opened, numel, dtype, chunks)
        communicator.barrier()
        communicator.close()


@pytest.mark.ranks(4)
def test_a_part_of_the_ranks_by_the_library():
    world = World.discover(cpu=True)
    axis = Mesh.build({"dp": 2, "tp": 2}, world)["tp"]
    communicator = open_native(axis=axis)
    for numel in (6, 7):
        check_flat(communicator, numel)
    communicator.close()


def test_elements_that_ranks_send():
    lengths, size = (5, 0, 20), 3
    for rank in range(size):
        chosen = {"size": size, "rank": rank, "chunks": bounds(lengths)}
        assert sent_elements("reduce_scatter", 25, **chosen) == 25 - lengths[rank]
        assert sent_elements("all_gather", 25, **chosen) == 25 - lengths[(rank + 1) % size]
        even = {**chosen, "chunks": chunk_bounds(25, size)}
        found = sent_elements("all_gather", 25, size=size, rank=rank)
        assert found == sent_elements("all_gather", 25, **even)
    everyone = [sent_elements("all_reduce", 1001, size=size, rank=rank) for rank in range(size)]
    assert sum(everyone) == 2 * (size - 1) * 1001, "all ranks together, whatever the rounding"
    with pytest.raises(UsageError, match="to 26"):
        sent_elements("all_gather", 26, size=size, chunks=bounds(lengths))


@pytest.mark.ranks(1)
def test_one_rank_holds_all_of_it():
    traffic = Traffic()
    communicator = open_ring(traffic)
    flat = torch.ones(4)
    communicator.reduce_scatter(flat, scale=0.5, chunks=[(0, 4)]).wait()
    communicator.all_gather(flat, chunks=[(0, 4)]).wait()
    assert flat.tolist() == [0.5] * 4
    with pytest.raises(UsageError, match="each of 1 ranks"):
        communicator.all_gather(flat, chunks=[(0, 2), (2, 4)])
    written = communicator.gather_parts([[flat]], first=lambda: flat.add_(1))
    written.wait()
    written.wait()
    assert flat.tolist() == [1.5] * 4
    parts = [[torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(0)]]
    communicator.gather_parts(parts).wait()
    handle = communicator.reduce_parts(parts, scale=0.5)
    handle.wait()
    assert handle.done()
    assert [each.tolist() for each in parts[0]] == [[0.5] * 3, [0.5] * 2, []]
    communicator.all_reduce(parts[0][0], scale=0.5).wait()
    assert parts[0][0].tolist() == [0.25] * 3
    assert not traffic.entries()


WRONG = {
    "too few": [(0, 8)],
    "too many": [(0, 4), (4, 8), (8, 8)],
    "late start": [(1, 4), (4, 8)],
    "gap": [(0, 3), (4, 8)],
    "overlap": [(0, 5), (4, 8)],
    "backward": [(0, 9), (9, 8)],
    "short": [(0, 4), (4, 7)],
    "none": [],
}


@pytest.mark.ranks(2)
def test_wrong_chunks_and_shapes_are_refused_and_nothing_is_sent():
    for opened in (open_ring, open_native):
        traffic = Traffic()
        communicator = opened(traffic)
        for chunks in WRONG.values():
            with pytest.raises(UsageError, match=r"expected one \(start, stop\).*found.*leave"):
                communicator.reduce_scatter(torch.zeros(8), chunks=chunks)
            with pytest.raises(UsageError, match="each of 2 ranks"):
                communicator.all_gather(torch.zeros(8), chunks=chunks)
        with pytest.raises(UsageError, match="to 0"):
            communicator.all_gather(torch.zeros(0), chunks=[(0, 1), (1, 1)])
        with pytest.raises(UsageError, match="contiguous"):
            communicator.all_reduce(torch.ones(4, 4).t())
        with pytest.raises(UsageError, match="expected shape"):
            communicator.reduce_scatter(torch.ones(4, 4))
        assert not traffic.entries()
        communicator.barrier()
        communicator.close()


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_answer_is_an_error_after_the_timeout():
    communicator = open_ring(timeout_s=2)
    communicator.barrier()
    if communicator.rank != 2:
        start = time.perf_counter()
        with pytest.raises(CollectiveError) as caught:
            communicator.all_reduce(torch.zeros(100_000), label="the test").wait()
        assert time.perf_counter() - start > 0.5
        for fact in ("all_reduce #2", "the test", "'dp'", "rank", "of 3", "timeout of 2 s"):
            assert fact in str(caught.value)
        with pytest.raises(CollectiveError, match="broken by an earlier failure"):
            communicator.all_reduce(torch.zeros(1))
    dist.barrier()  # the last rank is alive, but silent, until the others have given up
    communicator.close()
