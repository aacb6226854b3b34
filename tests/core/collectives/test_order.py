"""Ranks that do different things on a ring: an error that says what; no crash, no long wait."""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.collectives import Communicator, Handle
from drivetrain.collectives.communicator import Header, Request, SoloCommunicator
from drivetrain.cost import Page, Traffic
from drivetrain.errors import CollectiveError
from drivetrain.runtime.mesh import Axis
from flat_collectives import open_ring


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


def of_four(operation: str, *arguments: object, **options: object):
    return lambda ring: getattr(ring, operation)(torch.zeros(4), *arguments, **options)


OTHER_PLAN = "chunks, source or reduction"
PAIRS = [
    (gather(5000, "unit a"), gather(5000, "unit b"), "label"),
    (gather(2_000_000, "u"), gather(10, "u"), "elements"),
    (gather(10, "u"), gather(2_000_000, "u"), "elements"),
    (gather(100), scatter(100), "operation"),
    (gather(7, "unit a"), scatter(100_000, "unit b"), "operation, elements, label"),
    (gather(64), lambda ring: ring.all_gather(torch.zeros(64, dtype=torch.float64)), "dtype"),
    (gather(100, "u"), gather(100, "u", chunks=[(0, 100), (100, 100)]), OTHER_PLAN),
    (of_four("all_reduce"), of_four("all_reduce", reduction="max"), OTHER_PLAN),
    (of_four("broadcast", 0), of_four("broadcast", 1), OTHER_PLAN),
]


@pytest.mark.ranks(2)
def test_two_ranks_that_differ_are_told_what_each_was_doing():
    for usual, other, words in PAIRS:
        message = diverge(usual, other)
        assert f"they differ in {words}; the ranks took different paths" in message
        assert "on rank 0" in message
        assert "on rank 1" in message
        assert "on axis 'dp'" in message
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
    said = f"they differ in optimizer steps before ({steps}); one of them has left out"
    assert said in str(caught.value)
    ring.close()


@pytest.mark.ranks(2)
def test_ranks_that_step_with_other_learning_rates_are_told_both():
    traffic = Traffic()
    ring = open_ring(traffic)
    traffic.begin_step([{"lr": 0.5}, {"lr": 0.1 * (1 + ring.rank)}, {"lr": torch.ones(())}])
    with pytest.raises(CollectiveError) as caught:
        ring.all_reduce(torch.zeros(10), label="gradients").wait()
    rates = "0.1 and 0.2" if ring.rank == 0 else "0.2 and 0.1"
    said = f"learning rates of the step before ({rates}); set them alike on all ranks, a Reduce"
    assert said in str(caught.value)
    ring.close()


@pytest.mark.ranks(3)
def test_a_broadcast_with_another_tensor():
    ring = open_ring()
    with pytest.raises(CollectiveError, match=r"rank 2.*\(weights\)|\(weights\).*rank 2"):
        ring.broadcast(torch.zeros(10 + (ring.rank == 2)), source=0, label="weights").wait()
        ring.barrier()  # the first ranks of the chain may go on
    ring.close()


def header_of(request: Request, flat: torch.Tensor, *page: Any) -> Header:
    alone = Axis(name="dp", size=1, rank=0, ranks=(0,), hosts=("here",))
    communicator = SoloCommunicator(alone, Traffic(), timedelta(seconds=1))
    communicator.traffic.page = Page(*page)
    return communicator._header(request, flat)


def test_a_header_survives_the_journey():
    flat = torch.zeros(5, dtype=torch.bfloat16)
    header = header_of(Request("reduce_scatter", "unit 3", ((0, 5),)), flat, 1, 2, (0.1,))
    assert Header.from_json(json.loads(json.dumps(header._asdict()))) == header
    assert str(header) == "reduce_scatter #1 of 5 bfloat16 (unit 3)"


def test_every_fact_of_a_header_is_in_its_checksum():
    header = header_of(Request("all_gather", "u"), torch.zeros(5), 3, 4)
    for name in ("number", "elements", "plan", "name", "steps", "backwards", "rates", "loads"):
        change = (0.1,) if name == "rates" else 1
        other = header._replace(**{name: getattr(header, name) + change})
        assert other.checksum() != header.checksum(), name
        assert header.differences(other), name
    plans = {  # hold the operation and the dtype
        header_of(Request(operation, "u"), torch.zeros(5, dtype=dtype)).plan
        for operation in ("all_gather", "reduce_scatter")
        for dtype in (torch.float32, torch.int32)
    }
    assert len(plans) == 4
