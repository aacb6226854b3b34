"""Checkpoints of local steps: in the middle of a round, and on other workers and strategies."""

import pytest
import torch
from torch import nn

from local_trainings import Training, check_alike_on_all_ranks, check_equal, hosts, local
from local_workers import Blocks, Rounds, batch
from resumed_workers import check_same_bits, goes_on_bit_for_bit
from stacks import Parts

pytestmark = pytest.mark.ranks(2)

STREAMING = Rounds(every=4, fragments=2, delay=3, keep=0.5)


@pytest.mark.parametrize(
    ("rounds", "inner", "at"), [(STREAMING, "zero1", 5), (Rounds(every=4), "ddp", 6)]
)
def test_a_round_goes_on_bit_for_bit(folder, rounds, inner, at):
    goes_on_bit_for_bit(folder, lambda: Training(local(rounds, inner)), at)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero2", "zero3"])
def test_buffers_of_each_worker_go_on_in_mid_round(folder, inner):
    def make():
        model = nn.Sequential(Blocks(), nn.BatchNorm1d(3).double())
        return Training(local(Rounds(every=4), inner), model)

    straight, resumed = make(), make()
    straight.run(0, 2).accelerator.save_state(folder)
    resumed.accelerator.load_state(folder)
    states = [dict(each.run(2, 3).model.named_buffers()) for each in (straight, resumed)]
    check_same_bits(*states)


@pytest.mark.ranks(2)
def test_buffers_of_the_first_worker_are_those_of_all_others(folder):
    two = Training(local(Rounds(every=4)), nn.Sequential(Blocks(), nn.BatchNorm1d(3).double()))
    two.run(0, 2).accelerator.save_state(folder)
    one = Training("zero1", nn.Sequential(Blocks(), nn.BatchNorm1d(3).double()))
    one.accelerator.load_state(folder)
    first = two.accelerator.gather(two.model[1].running_mean[None])[0]
    assert torch.equal(one.model[1].running_mean, first)


@pytest.mark.ranks(4)
def test_an_exchange_under_way_ends_with_another_number_of_workers(monkeypatch, folder):
    rounds = Rounds(every=4, delay=3, keep=0.5)
    four = Training(local(rounds))
    four.run(0, 5)  # the exchange after step 4 ends after step 7
    four.accelerator.save_state(folder)
    four.run(5, 7)
    hosts(monkeypatch)
    two = Training(local(rounds, workers="hosts"))
    two.accelerator.load_state(folder)
    two.run(5, 7)
    check_equal(two.outer(), four.outer())


def test_one_worker_goes_on_from_the_mean_of_all(folder):
    rounds = STREAMING
    two = Training(local(rounds))
    two.run(0, 6)
    two.accelerator.save_state(folder)

    def mean(value):
        return two.accelerator.reduce(value, "mean")

    weights = {name: mean(value) for name, value in two.own().items()}
    moments = {
        key: mean(two.optimizer.state[two.model.last.weight][key])
        for key in ("exp_avg", "exp_avg_sq")
    }
    one = Training(local(rounds, workers="hosts"))  # a worker of two ranks
    one.accelerator.load_state(folder)
    check_equal(one.own(), weights)
    state = dict(one.optimizer.state[one.model.last.weight])
    assert state.pop("step") == 6
    assert set(state) == set(moments), "an optimizer by itself has no outer state"
    torch.testing.assert_close(state, moments, rtol=1e-12, atol=1e-12)
    one.run(6, 7)
    one.accelerator.save_state(folder, overwrite=True)
    two.accelerator.load_state(folder)
    check_same_bits(two.own(), one.own())


def wide(*, transposed=False):
    """Return a layer with a matrix that methods for slow links approximate, in fp32."""
    torch.manual_seed(5)
    parts = {"first": nn.Linear(5, 64), "wide": nn.Linear(64, 64), "last": nn.Linear(64, 3)}
    if transposed:
        matrix = parts["wide"].weight.detach().T.contiguous().T
        parts["wide"].weight = nn.Parameter(matrix)
    return Parts(lambda m, x: m.last(torch.tanh(m.wide(m.first(x.float())))), **parts)


def errors_of(training):
    """Return the sums of all workers' errors of the matrix, as a checkpoint gets them."""
    found, keys = torch.zeros(64 * 64), set()
    for shard in training.accelerator.strategy_of(training.model).state.shards():
        if shard.name == "wide.weight" and shard.state.startswith("links.error."):
            assert shard.state not in keys, "two channels have errors of the same elements"
            keys.add(shard.state)
            first = int(shard.state.removesuffix("@").rpartition(".")[2])
            found[first : first + len(shard.tensor)] += shard.tensor
    return training.accelerator.reduce(found, "sum")


@pytest.mark.parametrize("method", ["int4", "topk", "powersgd"])
def test_kept_errors_go_on_bit_for_bit(folder, method):
    rounds = Rounds(every=2, fragments=2, delay=1)

    def make():
        return Training(local(rounds), wide(), links={"gradients": method})

    goes_on_bit_for_bit(folder, make, 5, 9, other=4)  # which have errors of their own


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("inner", ["ddp", "zero1", "fsdp"])
def test_kept_errors_with_other_workers(monkeypatch, folder, inner, transposed):
    links = {"gradients": "int4"}
    four = Training(local(Rounds(every=2)), wide(transposed=transposed), links=links)
    four.run(0, 5)
    four.accelerator.save_state(folder)
    hosts(monkeypatch)
    said = []
    monkeypatch.setattr("drivetrain_local.state.logger.announce", said.append)
    strategy = local(Rounds(every=2), inner, workers="hosts")
    two = Training(strategy, wide(transposed=transposed), links=links)
    two.accelerator.load_state(folder)
    before, after = errors_of(four), errors_of(two)
    torch.testing.assert_close(after, before)
    assert said == []
    assert before.abs().sum() > 0
    two.run(5, 7)


@pytest.mark.parametrize("inner", ["zero1", "ddp", "fsdp"])
def test_errors_go_on_when_another_layer_is_thawed(folder, inner):
    """A message then has other tensors, and another channel, which takes the errors of the old one.

    All workers exchange the layer.
    """
    model = wide()
    model.first.requires_grad_(False)
    training = Training(local(Rounds(every=2), inner), model, links={"gradients": "int4"})
    training.run(0, 5)
    before = errors_of(training)
    assert before.abs().sum() > 0
    model.first.requires_grad_(True)
    if inner == "zero1":
        training.model(batch(5, 0))  # zero1 follows the change
        for outer in training.strategy._outer:
            for members in outer.messages.of():
                outer.messages.channel(0, members)
        torch.testing.assert_close(errors_of(training), before)
    training.run(5, 6)  # with an exchange
    after = errors_of(training)
    assert after.abs().sum() > 0
    assert not torch.equal(after, before)
    training.run(6, 8)
    outer = training.outer()
    check_alike_on_all_ranks(outer)
    assert not torch.equal(outer["first.weight"], wide().first.weight)
    training.accelerator.save_state(folder)


@pytest.mark.parametrize("rounds", [STREAMING, Rounds(every=4)], ids=["streaming", "all at once"])
@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero3", "fsdp"])
def test_a_layer_that_is_frozen_in_mid_round_is_exchanged_once_more(folder, inner, rounds):
    training = Training(local(rounds, inner), wide(), links={"gradients": "int4"})
    training.run(0, 7)
    training.model.first.requires_grad_(False)
    training.run(7, 9)
    training.accelerator.save_state(folder)
    training.run(9, 9 + 2 * rounds.every)
    check_alike_on_all_ranks(training.outer())
    with training.accelerator.gathered(training.model):
        first = {name: p.detach().clone() for name, p in training.model.first.named_parameters()}
    check_alike_on_all_ranks(first)
    assert torch.equal(first["weight"], training.outer()["first.weight"])
    resumed = Training(local(rounds, inner), wide(), links={"gradients": "int4"})
    resumed.model.first.requires_grad_(False)
    resumed.accelerator.load_state(folder)
    check_alike_on_all_ranks(resumed.outer())
    resumed.model.first.requires_grad_(True)
    resumed.run(9, 9 + 2 * rounds.every)
    check_alike_on_all_ranks(resumed.outer())
    assert not torch.equal(resumed.outer()["first.weight"], first["weight"]), "it trains again"


def test_other_strategies_read_the_outer_weights(folder):
    saved = Training(local(STREAMING))
    saved.run(0, 6)
    saved.accelerator.save_state(folder)
    exact = Training("zero1")
    exact.accelerator.load_state(folder)
    check_same_bits(exact.outer(), saved.outer())
    keys = {key for state in exact.optimizer.state.values() for key in state}
    assert keys == {"step", "exp_avg", "exp_avg_sq"}
    exact.run(6, 7)
    exact.accelerator.save_state(folder, overwrite=True)
    saved.accelerator.load_state(folder)
    check_same_bits(saved.outer(), exact.outer())
    saved.run(7, 9)
