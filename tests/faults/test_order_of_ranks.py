"""A rank that leaves a collective out, or adds one: all ranks hear which rank, and which call."""

import re

import pytest
import torch
import torch.distributed as dist

from drivetrain import Accelerator, CollectiveError

pytestmark = pytest.mark.ranks(2)

ODD, STEP = 1, 2
"""The rank that does something else, and the step in which it does."""

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")


class Training:
    """A small training on every rank; the odd rank does something else in one step."""

    def __init__(self, strategy: str) -> None:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.accelerator = Accelerator(cpu=True, strategy=strategy)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(net, optimizer)
        self.step = 0

    def steps(self, odd):
        rank = dist.get_rank()
        for step in range(STEP + 4):
            self.step = step
            strange = rank == ODD and step == STEP
            loss = self.model(torch.full((3, 4), float(rank + step))).square().mean()
            if strange:
                odd(self, loss)
            else:
                self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def fails(self, odd) -> str:
        with pytest.raises(CollectiveError) as caught:
            self.steps(odd)
            self.accelerator.wait_for_everyone()
        assert self.step <= STEP + 1  # no mean of gradients of different steps
        return str(caught.value)


def leave_out(training: Training, loss) -> None:
    """No backward."""


def gather_too(training: Training, loss) -> None:
    training.accelerator.gather(loss.detach())
    training.accelerator.backward(loss)


def wait_too(training: Training, loss) -> None:
    training.accelerator.wait_for_everyone()
    training.accelerator.backward(loss)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_left_out(strategy):
    message = Training(strategy).fails(leave_out)
    other = 1 - dist.get_rank()
    assert f"rank {other}" in message
    assert re.search(r"test_order_of_ranks\.py:\d+", message), message


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
@pytest.mark.ranks(3)
def test_an_extra_gather(strategy):
    message = Training(strategy).fails(gather_too)
    assert "rank 1" in message
    assert "gather" in message
    assert re.search(r"test_order_of_ranks\.py:\d+", message), message


def test_an_extra_barrier():
    message = Training("zero1").fails(wait_too)
    assert "wait_for_everyone" in message
    assert re.search(r"test_order_of_ranks\.py:\d+", message), message


def test_a_barrier_where_others_step():
    """The exchange of optimizer.step() and a barrier both send eight bytes over one group."""
    training = Training("ddp")
    rank = dist.get_rank()
    with pytest.raises(CollectiveError) as caught:
        for _ in range(3):
            training.accelerator.backward(training.model(torch.ones(1, 4)).sum())
            if rank == ODD:
                training.accelerator.wait_for_everyone()
            training.optimizer.step()
        training.accelerator.wait_for_everyone()
    message = str(caught.value)
    assert re.search(r"rank 0: optimizer\.step\(\).* at test_order_of_ranks\.py:\d+", message)
    assert re.search(r"rank 1: wait_for_everyone at test_order_of_ranks\.py:\d+", message)


def test_loops_with_different_numbers_of_batches_are_no_error():
    training = Training("ddp")
    with training.accelerator.join_uneven_inputs([training.model]):
        for _ in range(2 + dist.get_rank()):
            training.accelerator.backward(training.model(torch.ones(1, 4)).sum())
            training.optimizer.step()
            training.optimizer.zero_grad()
    training.accelerator.backward(training.model(torch.ones(1, 4)).sum())
    training.optimizer.step()
