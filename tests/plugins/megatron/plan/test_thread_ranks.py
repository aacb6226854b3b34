"""Ranks as threads: collectives, their bytes, errors that end all of them, backward per thread."""

import random
from datetime import timedelta

import pytest
import torch

from drivetrain.collectives import sent_elements
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.runtime import rng
from drivetrain_megatron.plan.thread_ranks import run_emulated

each_size = pytest.mark.parametrize("size", [1, 2, 3, 4])
SHORT, LONG = timedelta(seconds=0.3), timedelta(hours=1)


@each_size
def test_collectives_and_their_bytes(size):
    def body(ranks):
        mine = torch.arange(7.0) + ranks.rank
        inputs = [torch.arange(7.0) + rank for rank in range(size)]
        summed, largest, copied, scattered = (mine.clone() for _ in range(4))
        ranks.all_reduce(summed, scale=0.5).wait()
        assert torch.equal(summed, sum(inputs) * 0.5)
        ranks.all_reduce(largest, reduction="max").wait()
        assert torch.equal(largest, inputs[-1])
        ranks.broadcast(copied, source=size - 1).wait()
        assert torch.equal(copied, inputs[-1])
        chunks = [(0, 7)] + [(7, 7)] * (size - 1)
        ranks.reduce_scatter(scattered, chunks=chunks, scale=2).wait()
        if ranks.rank == 0:
            assert torch.equal(scattered, sum(inputs) * 2)
        gathered = mine.clone()
        ranks.all_gather(gathered, chunks=chunks).wait()
        assert torch.equal(gathered, inputs[0])
        ranks.barrier()
        calls = ("all_reduce", 2, None), ("broadcast", 1, None)
        for name, times, _ in (*calls, ("reduce_scatter", 1, chunks), ("all_gather", 1, chunks)):
            is_chunked = name in ("reduce_scatter", "all_gather")
            elements = sent_elements(
                name,
                7,
                size=size,
                rank=ranks.rank,
                source=size - 1,
                chunks=chunks if is_chunked else None,
            )
            entry = ranks.traffic.entries()["tp", name]
            assert (entry.calls, entry.bytes) == (times, times * elements * 4)

    run_emulated(size, body)


def test_results_come_by_rank_and_sums_are_the_same_bits():
    def body(ranks):
        value = torch.tensor(0.1) * 3**ranks.rank
        ranks.all_reduce(value).wait()
        return ranks.rank, value

    results = run_emulated(4, body)
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    assert len({value.item() for _, value in results}) == 1


def test_the_first_exception_ends_all_ranks():
    reached = []

    def body(ranks):
        if ranks.rank == 2:
            raise ZeroDivisionError("of rank 2")
        ranks.barrier()
        reached.append(ranks.rank)

    with pytest.raises(ZeroDivisionError, match="of rank 2"):
        run_emulated(4, body, LONG)
    assert reached == []


def test_a_rank_that_does_not_come_is_not_waited_for():
    def body(ranks):
        if ranks.rank:
            ranks.all_reduce(torch.zeros(3)).wait()

    with pytest.raises(CollectiveError, match=r"all_reduce of 3 .* did not come within 0.3 s"):
        run_emulated(2, body, SHORT)


def test_different_operations_are_named():
    def body(ranks):
        tensor = torch.zeros(4 + ranks.rank)
        ranks.all_reduce(tensor, label=f"of rank {ranks.rank}").wait()

    with pytest.raises(CollectiveError, match=r"of 4 .*\(of rank 0\); rank 1: .* of 5"):
        run_emulated(2, body, SHORT)


def test_chunks_that_cover_nothing_are_refused():
    def body(ranks):
        ranks.all_gather(torch.zeros(4), chunks=[(0, 1), (2, 4)])

    with pytest.raises(UsageError, match="one \\(start, stop\\) for each of 2 ranks"):
        run_emulated(2, body, SHORT)


def test_backward_runs_in_the_thread_of_its_rank():
    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ranks):
            ctx.ranks = ranks
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            ctx.ranks.all_reduce(grad).wait()
            return grad, None

    def body(ranks):
        x = torch.ones(3, requires_grad=True)
        (Meet.apply(x, ranks) * (ranks.rank + 1)).sum().backward()
        return x.grad.tolist()

    assert run_emulated(3, body) == [[6, 6, 6]] * 3


def test_grad_mode_is_the_callers():
    with torch.no_grad():
        assert run_emulated(2, lambda ranks: torch.is_grad_enabled()) == [False, False]
    assert run_emulated(2, lambda ranks: torch.is_grad_enabled()) == [True, True]


def test_ranks_draw_alike_and_leave_generators_alone():
    def body(ranks):
        drawn = [torch.rand(()).item()]
        for _ in range(3):
            ranks.barrier()
            drawn += [torch.rand(()).item(), random.random()]
        return drawn

    before = rng.capture()
    first, *others = run_emulated(3, body)
    assert len(set(first)) == len(first)
    assert others == [first, first]
    torch.testing.assert_close(rng.capture(), before)
