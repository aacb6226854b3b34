"""Ranks as threads: collectives, their bytes, errors that end all of them, backward per thread."""

import random

import pytest
import torch

from drivetrain.errors import CollectiveError, UsageError
from drivetrain.runtime import rng
from drivetrain_megatron.plan.trial import run_emulated


def test_errors_end_all_ranks():
    reached = []

    def fails(ranks):
        if ranks.rank == 2:
            raise ZeroDivisionError("of rank 2")
        ranks.barrier()
        reached.append(ranks.rank)

    with pytest.raises(ZeroDivisionError, match="of rank 2"):
        run_emulated(4, fails)
    assert reached == []

    def fails_alike(ranks):
        ranks.barrier()
        raise ZeroDivisionError(f"of rank {ranks.rank}")

    with pytest.raises(ZeroDivisionError, match="of rank 0"):
        run_emulated(4, fails_alike)

    def stays_away(ranks):
        if ranks.rank:
            ranks.all_reduce(torch.zeros(3)).wait()

    def other_size(ranks):
        label = f"of rank {ranks.rank}"
        ranks.all_reduce(torch.zeros(4 + ranks.rank), label=label).wait()

    def other_chunks(ranks):
        ranks.all_gather(torch.zeros(4), chunks=[(0, 1), (2, 4)])

    for body, error, match in (
        (stays_away, CollectiveError, r"all_reduce of 3 .* has failed or ended"),
        (other_size, CollectiveError, r"of 4 .*\(of rank 0\); rank 1: .* of 5"),
        (other_chunks, UsageError, r"one \(start, stop\) for each of 2 ranks"),
    ):
        with pytest.raises(error, match=match):
            run_emulated(2, body)


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
