"""Workers that come late to exchanges: the others go on, and all have the same outer weights."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from drivetrain import ConfigError
from local_trainings import Training, check_alike_on_all_ranks, check_equal, hosts, local
from local_workers import Blocks, ByHand, Rounds, fragment_of
from resumed_workers import check_same_bits

pytestmark = pytest.mark.ranks(2)

LATE_S = 60.0
"""More than a test takes: a clock of the test's own says when a wait is over."""


def sgd(model):
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def late(rounds, inner="ddp", workers="ranks", model=None, links=None, late_s=LATE_S):
    strategy = local(rounds, inner, workers, late_s=late_s)
    return Training(strategy, model, make=sgd, links=links)


def store():
    return dist.distributed_c10d._get_default_store()


def say(text):
    store().set(f"test/{text}", "")


def wait_for(text):
    store().wait([f"test/{text}"])


def meet(text):
    """Let all ranks go on from here together."""
    say(f"{text}/{dist.get_rank()}")
    for rank in range(dist.get_world_size()):
        wait_for(f"{text}/{rank}")


class Clock:
    """The clock by which workers wait for late ones: it stands still, or jumps if some ranks wait.

    So a test says who is late; it neither takes the time of a wait nor depends on it.
    """

    def __init__(self, monkeypatch):
        self._now = 0.0
        self.stop()
        monkeypatch.setattr("drivetrain_local.sync.time", self)

    def stop(self, moment="a wait without end"):
        """Let the next wait last until all workers are there."""
        self._moment, self._ranks = moment, ()

    def jump(self, moment, *ranks):
        """Let the next wait be over when these ranks are in it."""
        self._moment, self._ranks = moment, ranks

    def monotonic(self):
        say(f"{self._moment}/{dist.get_rank()}")
        if self._ranks and store().check([f"test/{self._moment}/{rank}" for rank in self._ranks]):
            self._now += 2 * LATE_S
        return self._now

    def sleep(self, seconds):
        time.sleep(0.02)


@pytest.mark.ranks(3)
def test_a_late_worker_is_left_out_of_one_round(monkeypatch):
    clock = Clock(monkeypatch)
    rounds = Rounds(every=2)
    training = late(rounds)
    training.run(0, 1)
    if training.rank == 1:
        wait_for("the others have exchanged")
    clock.jump("two of three wait", 0, 2)
    training.run(1, 2)
    say("the others have exchanged")
    clock.stop()
    assert training.strategy.missed == (training.rank == 1)
    by_hand = ByHand(3, 1, rounds, sgd, present={2: [0, 2]})
    by_hand.train(2)
    check_equal(training.own(), by_hand.outer)
    training.run(2, 7)
    assert training.strategy.missed == (training.rank == 1), "in later rounds it takes part"
    check_equal(training.outer(), by_hand.train(5))
    check_alike_on_all_ranks(training.outer())


def test_a_worker_that_is_rounds_behind_joins_again(monkeypatch):
    clock = Clock(monkeypatch)
    training = late(Rounds(every=2))
    if training.rank == 0:
        clock.jump("alone", 0)
        training.run(0, 4)  # two rounds
        say("two rounds")
        clock.stop("third round")
        training.run(4, 6)  # together
        clock.jump("alone", 0)
        training.run(6, 8)
        say("four rounds")
    else:
        training.run(0, 1)
        wait_for("two rounds")
        training.run(1, 3)
        wait_for("third round/0")  # a worker that is behind takes part only where another one waits
        training.run(3, 5)
        wait_for("four rounds")
        training.run(5, 8)  # takes the fourth; a fifth is opened by nobody
    assert training.strategy.missed == 2 * training.rank
    by_hand = rounds_behind()
    check_equal(training.own(), dict(by_hand.models[training.rank].named_parameters()))
    check_equal(training.outer(), by_hand.outer)
    check_alike_on_all_ranks(training.outer())


def rounds_behind():
    """Train in one process as the test above does."""
    by_hand = ByHand(2, 1, Rounds(every=2), sgd)

    def steps(worker, *numbers):
        for by_hand.steps in numbers:
            by_hand.inner_step(worker, by_hand.models[worker], 1)

    def exchange(*workers):
        by_hand.outer_step(by_hand.outer_gradients(0, workers))

    steps(1, 0, 1)
    steps(0, 0, 1)
    exchange(0)
    steps(0, 2, 3)
    exchange(0)
    steps(0, 4, 5)
    steps(1, 2, 3)
    exchange(0, 1)
    steps(0, 6, 7)
    steps(1, 4, 5)
    exchange(0)
    steps(1, 6, 7)
    return by_hand


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero3", {"name": "offload"}])
def test_a_late_host_of_two_ranks_and_fragments(monkeypatch, inner):
    hosts(monkeypatch)
    clock = Clock(monkeypatch)
    rounds = Rounds(every=4, fragments=2)
    training = late(rounds, inner, "hosts")
    training.run(0, 3)
    if training.rank >= 2:
        wait_for("the other host has exchanged")
    clock.jump("one of two hosts waits", 0)
    training.run(3, 4)
    say("the other host has exchanged")
    clock.stop()
    training.run(4, 9)
    assert training.strategy.missed == (training.rank >= 2)
    by_hand = ByHand(2, 2, rounds, sgd, fragment_of, present={4: [0]})
    check_equal(training.outer(), by_hand.train(9))
    check_alike_on_all_ranks(training.outer())


def test_the_others_do_not_wait_longer():
    training = late(Rounds(every=2), late_s=0.1)
    meet("start")
    start = time.monotonic()
    if training.rank == 1:
        wait_for("four rounds")
    training.run(0, 8)
    say("four rounds")
    if training.rank == 0:
        # Four waits; with one that lasted until rank 1 came the test would not end.
        assert time.monotonic() - start >= 0.4
    check_alike_on_all_ranks(training.outer())


@pytest.mark.parametrize("inner", ["ddp", "zero1", {"name": "offload"}])
def test_a_checkpoint_in_the_middle_of_the_next_round(monkeypatch, tmp_path, inner):
    clock = Clock(monkeypatch)
    folder = str(tmp_path / "checkpoint")
    straight = late(Rounds(every=4), inner)
    straight.run(0, 3)
    if straight.rank == 1:
        wait_for("the other has exchanged")
    clock.jump("one of two waits", 0)
    straight.run(3, 4)
    say("the other has exchanged")
    clock.stop()
    straight.run(4, 6)
    straight.accelerator.save_state(folder)
    straight.run(6, 11)
    assert straight.strategy.missed == straight.rank
    resumed = late(Rounds(every=4), inner)
    resumed.run(20, 21)
    resumed.accelerator.load_state(folder)
    resumed.run(6, 11)
    check_same_bits(resumed.outer(), straight.outer())
    check_same_bits(resumed.own(), straight.own())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("links", [{}, {"gradients": "int4", "options": {"block": 16}}])
def test_workers_that_come_as_they_like(seed, links):
    model = nn.Sequential(Blocks(), nn.BatchNorm1d(3).double())  # which has buffers
    training = late(Rounds(every=2, fragments=2), late_s=0.02, model=model, links=links)
    chance = random.Random(10 * seed + training.rank)
    for step in range(16):
        time.sleep(chance.choice([0, 0, 0, 0.01, 0.05, 0.1]))
        training.run(step, step + 1)
    missed = torch.tensor(training.strategy.missed)
    dist.all_reduce(missed)
    assert missed > 0
    check_alike_on_all_ranks(training.outer())
    check_alike_on_all_ranks(dict(training.model.named_buffers()))


def test_refused():
    for options, message in (
        ({"late_s": 1.0, "delay": 2}, "strategy.late_s: expected no strategy.delay"),
        ({"late_s": 1e6}, "strategy.late_s: expected less than the"),
        ({"late_s": -1.0}, "late_s"),
    ):
        with pytest.raises(ConfigError, match=message):
            Training({**local(Rounds(every=4)), **options})
    strategy = local(Rounds(every=4), late_s=1.0)
    with pytest.raises(ConfigError, match="strategy.late_s: expected precision: bf16 or no"):
        Training(strategy, precision="fp16")
    training = Training(strategy, make=sgd, on_nonfinite="skip")
    with pytest.raises(ConfigError, match="on_nonfinite: expected stop or ignore"):
        training.run(0, 1)
