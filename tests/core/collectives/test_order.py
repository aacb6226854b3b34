"""Ranks that do different things on a ring: an error that says what; no crash, no long wait."""

import json
import re
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
    dist.barrier()  # nobody leaves before all have heard
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


@pytest.mark.ranks(2)
def test_two_ranks_differ():
    for usual, other, words in PAIRS.values():
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
    plans = {  # hold the operation and the dtype
        Header.of(Request(operation, "u"), 7, "u", torch.zeros(5, dtype=dtype), Page(), "dp").plan
        for operation in ("all_gather", "reduce_scatter")
        for dtype in (torch.float32, torch.int32)
    }
    assert len(plans) == 4
