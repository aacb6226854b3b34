"""Ranks that do different things on a ring: an error that says what; no crash, no long wait."""

import itertools
import json
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drivetrain.collectives import Communicator, Handle, connect
from drivetrain.collectives.communicator import Request
from drivetrain.collectives.order import Header
from drivetrain.errors import CollectiveError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from drivetrain.traffic import Page, Traffic

TIMEOUT_S = 3600.0
"""Far beyond a test's own limit: a rank that waits for it fails its test."""


def open_ring(traffic: Traffic | None = None) -> Communicator:
    world = World.discover(cpu=True)
    axis = Mesh.build({"dp": world.size}, world)["dp"]
    timeout = timedelta(seconds=TIMEOUT_S)
    return connect(axis, traffic or Traffic(), torch.device("cpu"), timeout)


def diverge(
    usual: Callable[[Communicator], Handle], other: Callable[[Communicator], Handle]
) -> str:
    """The last rank does something else than the others; return what this rank is told."""
    communicator = open_ring()
    communicator.all_reduce(torch.zeros(10), label="before").wait()
    last = communicator.rank == communicator.size - 1
    with pytest.raises(CollectiveError) as caught:
        (other if last else usual)(communicator).wait()
    with pytest.raises(CollectiveError, match="broken by an earlier failure"):
        communicator.barrier()
    communicator.close()
    return str(caught.value)


def gather(numel: int, label: str = "", **options: object) -> Callable[[Communicator], Handle]:
    return lambda ring: ring.all_gather(torch.zeros(numel), label=label, **options)


def scatter(numel: int, label: str = "") -> Callable[[Communicator], Handle]:
    return lambda ring: ring.reduce_scatter(torch.zeros(numel), label=label)


PAIRS = {
    "another unit": (gather(5000, "unit a"), gather(5000, "unit b"), "label"),
    "a shorter tensor": (gather(2_000_000, "u"), gather(10, "u"), "elements"),
    "a longer tensor": (gather(10, "u"), gather(2_000_000, "u"), "elements"),
    "another operation": (gather(100), scatter(100), "operation"),
    "all of it": (gather(7, "unit a"), scatter(100_000, "unit b"), "operation, elements, label"),
    "a dtype": (
        gather(64),
        lambda ring: ring.all_gather(torch.zeros(64, dtype=torch.float64)),
        "dtype",
    ),
    "chunks": (
        gather(100, "u"),
        lambda ring: ring.all_gather(
            torch.zeros(100), chunks=[(0, 100)] + [(100, 100)] * (ring.size - 1), label="u"
        ),
        "chunks, source or reduction",
    ),
    "a reduction": (
        lambda ring: ring.all_reduce(torch.zeros(4)),
        lambda ring: ring.all_reduce(torch.zeros(4), reduction="max"),
        "chunks, source or reduction",
    ),
    "a source": (
        lambda ring: ring.broadcast(torch.zeros(4), 0),
        lambda ring: ring.broadcast(torch.zeros(4), 1),
        "chunks, source or reduction",
    ),
}


@pytest.mark.parametrize("pair", list(PAIRS))
@pytest.mark.ranks(2)
def test_two_ranks_differ(pair):
    usual, other, words = PAIRS[pair]
    message = diverge(usual, other)
    assert f"they differ in {words}; the ranks took different paths" in message
    assert "on rank 0" in message
    assert "on rank 1" in message
    assert "on axis 'dp'" in message


@pytest.mark.ranks(2)
def test_the_message_says_what_each_was_doing():
    message = diverge(gather(5000, "values of block.1"), scatter(30, "gradients of block.0"))
    me, other = (", this one", "") if dist.get_rank() == 0 else ("", ", this one")
    assert f"all_gather #2 of 5000 float32 (values of block.1) on rank 0{me}" in message
    assert f"reduce_scatter #2 of 30 float32 (gradients of block.0) on rank 1{other}" in message


@pytest.mark.ranks(4)
def test_one_of_four_differs():
    message = diverge(gather(300_000, "unit a"), gather(500_000, "unit b"))
    assert "(unit a)" in message
    assert re.search(r"\(unit b\) on rank 3(, this one)? \(test_order.py:\d+\)", message)
    assert "they differ in elements, label" in message


@pytest.mark.ranks(3)
def test_a_rank_that_leaves_one_out_among_many():
    communicator = open_ring()
    numels = [random.Random(index).randrange(1, 50_000) for index in range(30)]
    skipped = 17 if communicator.rank == 1 else None
    with pytest.raises(CollectiveError) as caught:
        for handle in [
            communicator.all_gather(torch.zeros(numel), label=f"unit {index}")
            for index, numel in enumerate(numels)
            if index != skipped
        ]:
            handle.wait()
    assert "#18" in str(caught.value)
    assert "(unit 17)" in str(caught.value)
    assert "(unit 18)" in str(caught.value)
    communicator.close()


@pytest.mark.ranks(3)
def test_a_rank_that_comes_late_is_told_what_is_wrong():
    communicator = open_ring()
    communicator.barrier()
    if communicator.rank == 1:
        time.sleep(0.5)  # rank 0, the odd one, knows long before
    with pytest.raises(CollectiveError) as caught:
        communicator.all_gather(torch.zeros(50 + (communicator.rank == 0)), label="u").wait()
    assert "they differ in elements" in str(caught.value)
    communicator.close()


@pytest.mark.ranks(3)
def test_ranks_that_agree():
    ring = open_ring()
    for numel in (1, 2, 3, 1000, 1_000_000):
        flat = torch.full((numel,), float(ring.rank))
        handles = [
            ring.all_reduce(torch.ones(numel, 1)),
            ring.all_gather(flat, label=f"a label with umlauts äöü, far too long {'x' * 99}"),
            ring.reduce_scatter(torch.ones(numel), scale=0.5),
            ring.broadcast(torch.ones(numel), source=2),
            ring.all_gather(torch.ones(8), chunks=[(0, 0), (0, 8), (8, 8)]),
            ring.all_gather(torch.empty(0)),
        ]
        for handle in handles:
            handle.wait()
        expected = torch.empty(numel)
        for rank, (start, stop) in enumerate(ring.chunk(numel)):
            expected[start:stop] = rank
        assert torch.equal(flat, expected)
    ring.barrier()
    ring.close()


@pytest.mark.ranks(2)
def test_lines_of_code_may_differ():
    communicator = open_ring()
    flat = torch.ones(10)
    if communicator.rank == 0:
        communicator.all_reduce(flat).wait()
    else:
        communicator.all_reduce(flat).wait()
    assert flat.tolist() == [2.0] * 10
    communicator.close()


@pytest.mark.ranks(2)
def test_a_rank_that_is_a_step_ahead_is_told_so():
    traffic = Traffic()
    ring = open_ring(traffic)
    ring.all_reduce(torch.zeros(10), label="gradients").wait()
    traffic.begin_backward()
    if ring.rank == 1:
        traffic.end_step()
    with pytest.raises(CollectiveError) as caught:
        ring.all_reduce(torch.zeros(10), label="gradients").wait()
    steps = "0 and 1" if ring.rank == 0 else "1 and 0"
    assert f"they differ in optimizer steps before ({steps}); one of them has left out" in str(
        caught.value
    )
    ring.close()


@pytest.mark.ranks(3)
def test_a_broadcast_with_another_tensor():
    ring = open_ring()
    with pytest.raises(CollectiveError, match=r"rank 2.*\(weights\)|\(weights\).*rank 2"):
        ring.broadcast(torch.zeros(10 + (ring.rank == 2)), source=0, label="weights").wait()
        ring.barrier()  # the first ranks of the chain may go on
    ring.close()


def test_a_header_survives_the_journey():
    flat = torch.zeros(5, dtype=torch.bfloat16)
    call = Request("reduce_scatter", "unit 3", [(0, 5), (5, 5)])
    header = Header.of(call, 7, "unit 3", flat, Page(), "dp")
    assert Header.from_json(json.loads(json.dumps(header.to_json()))) == header
    assert str(header) == "reduce_scatter #7 of 5 bfloat16 (unit 3)"


def test_every_fact_of_a_header_is_in_its_checksum():
    header = Header.of(Request("all_gather", "u"), 7, "u", torch.zeros(5), Page(3, 4), "dp")
    for name in ("number", "elements", "plan", "name", "steps", "backwards"):
        other = header._replace(**{name: getattr(header, name) + 1})
        assert other.checksum() != header.checksum(), name
        assert header.differences(other), name


def test_operation_and_dtype_are_in_the_plan_of_a_header():
    def plan(operation: str, dtype: torch.dtype) -> int:
        flat = torch.zeros(5, dtype=dtype)
        return Header.of(Request(operation, "u"), 7, "u", flat, Page(3, 4), "dp").plan

    pairs = itertools.product(("all_gather", "reduce_scatter"), (torch.float32, torch.int32))
    assert len({plan(*pair) for pair in pairs}) == 4
