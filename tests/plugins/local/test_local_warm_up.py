"""The warm-up of local steps: for some steps, exactly the data parallelism of all ranks."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import ConfigError
from drivetrain.collectives.communicator import Finished
from drivetrain_local.outer import WarmUp, average_gradients
from local_trainings import Training, adamw, check_alike_on_all_ranks, check_equal, hosts, local
from local_workers import ByHand, Rounds, loss_of
from resumed_workers import check_same_bits, goes_on_bit_for_bit

ROUNDS = Rounds(every=3, warmup_steps=4)


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["zero2", "plain"])
def test_windows_and_clipping_are_those_of_data_parallelism(monkeypatch, inner):
    hosts(monkeypatch)
    options = {"accumulation": 2}
    warm = Training(local(ROUNDS, inner, "hosts"), **options).run(0, 4, micro_batches=2, clip=0.5)
    exact = Training("ddp", **options).run(0, 4, micro_batches=2, clip=0.5)
    check_equal(warm.outer(), exact.outer())
    check_alike_on_all_ranks(warm.own())
    torch.testing.assert_close(torch.stack(warm.norms), torch.stack(exact.norms))
    assert min(warm.norms) > 0.5, "nothing was clipped"
    warm.run(4, 9, micro_batches=2, clip=0.5)  # a round and two thirds of another
    by_hand = ByHand(2, 2, ROUNDS, adamw, clip=0.5)
    check_equal(warm.outer(), by_hand.train(9, micro_batches=2))
    worker = by_hand.models[warm.rank // 2]
    check_equal(warm.own(), dict(worker.named_parameters()))
    weighted = Training(local(ROUNDS, inner, "hosts"), **options)
    exact = Training("ddp", **options)
    for each in (weighted, exact):
        each.run(0, 3, micro_batches=2, weighted=True)
    check_equal(weighted.outer(), exact.outer())


def test_a_gradient_that_one_of_two_workers_lacks_is_half_of_the_other_and_one_of_nobody_stays():
    lacking, whole, nobody = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    whole.grad = torch.full((3,), 4.0)
    other = torch.tensor([3.0] * 3 + [1.0] * 3 + [0.0] * 3 + [1.0, 1.0, 0.0])  # its shares

    def all_reduce(flat, label):
        flat += other
        return Finished()

    workers = SimpleNamespace(size=2, all_reduce=all_reduce)
    messages = SimpleNamespace(dtype=lambda each: each.dtype, device=torch.device("cpu"))
    average_gradients([lacking, whole, nobody], workers, messages)
    assert lacking.grad.tolist() == [3.0] * 3
    assert whole.grad.tolist() == [2.0 + 1.0] * 3
    assert nobody.grad is None


def test_an_accumulation_inside_of_another_one_does_not_end_it():
    sent = []
    inner = SimpleNamespace(accumulating=lambda enabled: nullcontext())
    inner.backward = lambda loss: sent.append(warm_up._averages)
    warm_up = WarmUp(inner, None, [SimpleNamespace(warms_up=True)])
    with warm_up.accumulating():
        with warm_up.accumulating():
            warm_up.backward(None)
        warm_up.backward(None)
    assert sent == [False, False]
    assert warm_up._averages


@pytest.mark.ranks(2)
def test_ranks_step_together_in_the_warm_up_and_apart_afterwards():
    warm = Training(local(ROUNDS), check_replicas_every=1, on_nonfinite="skip")
    assert not warm.strategy.pace.apart
    warm.run(0, 2, clip=1.0)

    def infinite(model, inputs):
        return loss_of(model, inputs) * (float("inf") if dist.get_rank() == 1 else 1.0)

    before = warm.own()
    warm.run(2, 3, clip=1.0, loss=infinite)
    check_same_bits(warm.own(), before)  # all ranks have skipped the step
    warm.run(3, 4, clip=1.0)
    assert not warm.strategy.pace.apart
    warm.run(4, 5, clip=1.0)  # the fourth step, which is the last of the warm-up
    assert warm.strategy.pace.apart
    check_alike_on_all_ranks(warm.own())
    warm.run(5, 6)
    own = warm.own()["last.weight"]
    assert not torch.equal(own, warm.accelerator.reduce(own, "mean"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("inner", "at"), [("zero1", 2), ("ddp", 5)])
def test_checkpoints_go_on_bit_for_bit(folder, inner, at):
    goes_on_bit_for_bit(folder, lambda: Training(local(ROUNDS, inner)), at, 9, other=6)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("at", [2, 6])
def test_checkpoints_with_another_number_of_workers(monkeypatch, folder, at):
    hosts(monkeypatch)
    four = Training(local(ROUNDS, workers="ranks")).run(0, at)
    four.accelerator.save_state(folder)
    mean = {name: four.accelerator.reduce(value, "mean") for name, value in four.own().items()}
    two = Training(local(ROUNDS, "zero1", "hosts"))
    two.accelerator.load_state(folder)
    check_equal(two.own(), mean)
    two.run(at, 4)
    if at < 4:  # the steps of data parallelism do not depend on the workers
        four.run(at, 4)
        check_equal(two.outer(), four.outer())
    assert two.strategy.pace.apart


@pytest.mark.ranks(2)
def test_the_last_worker_counts_the_steps_of_the_warm_up(folder):
    """A host is lost, and comes back: the workers do not warm up again."""
    two = Training(local(ROUNDS)).run(0, 3)
    two.accelerator.save_state(folder)
    one = Training(local(ROUNDS, workers="hosts"))  # both ranks are on one host
    assert not one.strategy.pace.apart
    one.accelerator.load_state(folder)
    one.run(3, 6)
    one.accelerator.save_state(folder, overwrite=True)
    two.accelerator.load_state(folder)
    assert two.strategy.pace.apart
    check_same_bits(two.outer(), one.outer())


@pytest.mark.ranks(2)
def test_late_workers_are_waited_for_in_the_warm_up():
    late = Training(local(ROUNDS, late_s=60.0))
    assert late.strategy.pace.ranks is None
    late.run(0, 4)
    exact = Training("ddp").run(0, 4)
    check_equal(late.outer(), exact.outer())
    assert late.strategy.pace.ranks is not None
    late.run(4, 8)
    check_equal(late.outer(), ByHand(2, 1, ROUNDS, adamw).train(8))
    late = Training(local(ROUNDS, late_s=60.0), on_nonfinite="skip")
    with pytest.raises(ConfigError, match="on_nonfinite: expected stop or ignore"):
        late.run(0, 1)
