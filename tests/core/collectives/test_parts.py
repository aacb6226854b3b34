"""Chunks that the caller chooses: unequal, empty, all on one rank; bytes stay exact."""

import itertools
from datetime import timedelta

import pytest
import torch

from drivetrain.collectives import Communicator, connect, ring, sent_elements
from drivetrain.collectives.native import NativeCommunicator
from drivetrain.collectives.volume import chunk_bounds
from drivetrain.errors import UsageError
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain.runtime.world import World
from drivetrain.traffic import Traffic

PIECE = 64  # bytes: small, so that small chunks have many pieces
TIMEOUT = timedelta(seconds=30)
LENGTHS = {
    2: [(0, 1), (1, 0), (7, 3), (0, 100), (100, 0), (16, 17), (200, 15), (5, 5)],
    3: [(0, 0, 1), (0, 9, 0), (50, 0, 0), (1, 2, 3), (0, 33, 90), (90, 33, 0), (17, 0, 64)],
}


def bounds(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *itertools.accumulate(lengths)]))


def open_axis() -> Axis:
    world = World.discover(cpu=True)
    return Mesh.build({"dp": world.size}, world)["dp"]


def check_lengths(communicator: Communicator, traffic: Traffic, lengths: tuple[int, ...]) -> None:
    size, rank, chunks = communicator.size, communicator.rank, bounds(lengths)
    numel = chunks[-1][1]
    inputs = [torch.arange(numel, dtype=torch.int32) * (other + 2) + other for other in range(size)]
    start, stop = chunks[rank]
    scattered, gathered = inputs[rank].clone(), torch.full((numel,), -1, dtype=torch.int32)
    gathered[start:stop] = inputs[0][start:stop]
    traffic.clear()
    handles = [
        communicator.reduce_scatter(scattered, chunks=chunks),
        communicator.all_gather(gathered, chunks=chunks),
    ]
    for handle in handles:
        handle.wait()
    assert torch.equal(scattered[start:stop], torch.stack(inputs).sum(0)[start:stop].int())
    assert torch.equal(gathered, inputs[0])
    sent = {
        ("dp", "reduce_scatter"): 4 * (numel - lengths[rank]),
        ("dp", "all_gather"): 4 * (numel - lengths[(rank + 1) % size]),
    }
    assert traffic.sent() == {key: nbytes for key, nbytes in sent.items() if nbytes}
    half = torch.full((numel,), float(rank))
    communicator.reduce_scatter(half, scale=0.5, chunks=chunks).wait()
    assert half[start:stop].tolist() == [sum(range(size)) / 2] * (stop - start)


@pytest.mark.ranks(2, 3)
def test_chunks_of_any_lengths(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ring, "PIECE_BYTES", PIECE)
    axis, traffic = open_axis(), Traffic()
    communicators = [
        connect(axis, traffic, torch.device("cpu"), TIMEOUT),
        NativeCommunicator(axis, traffic, TIMEOUT, axis.group),
    ]
    for communicator in communicators:
        for lengths in LENGTHS[axis.size]:
            check_lengths(communicator, traffic, lengths)
        communicator.barrier()
        communicator.close()


@pytest.mark.ranks(1)
def test_one_rank_holds_all_of_it():
    communicator = connect(open_axis(), Traffic(), torch.device("cpu"), TIMEOUT)
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
def test_wrong_chunks_are_refused_and_nothing_is_sent():
    axis, traffic = open_axis(), Traffic()
    communicators = [
        connect(axis, traffic, torch.device("cpu"), TIMEOUT),
        NativeCommunicator(axis, traffic, TIMEOUT, axis.group),
    ]
    for communicator in communicators:
        for chunks in WRONG.values():
            with pytest.raises(UsageError, match=r"expected one \(start, stop\).*found.*leave"):
                communicator.reduce_scatter(torch.zeros(8), chunks=chunks)
            with pytest.raises(UsageError, match="each of 2 ranks"):
                communicator.all_gather(torch.zeros(8), chunks=chunks)
        with pytest.raises(UsageError, match="to 0"):
            communicator.all_gather(torch.zeros(0), chunks=[(0, 1), (1, 1)])
        communicator.all_gather(torch.zeros(0), chunks=[(0, 0), (0, 0)]).wait()
    assert not traffic.entries()
    communicators[0].close()


def test_sent_elements_of_chosen_chunks():
    lengths, size = (5, 0, 20), 3
    for rank in range(size):
        chosen = {"size": size, "rank": rank, "chunks": bounds(lengths)}
        assert sent_elements("reduce_scatter", 25, **chosen) == 25 - lengths[rank]
        assert sent_elements("all_gather", 25, **chosen) == 25 - lengths[(rank + 1) % size]
        even = sent_elements("all_gather", 25, size=size, rank=rank)
        assert even == sent_elements(
            "all_gather", 25, size=size, rank=rank, chunks=chunk_bounds(25, size)
        )
    with pytest.raises(UsageError, match="to 26"):
        sent_elements("all_gather", 26, size=size, chunks=bounds(lengths))
