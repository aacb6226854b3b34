"""The warm-up of local steps: for some steps, exactly the data parallelism of all ranks."""

import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain import Accelerator, ConfigError
from drivetrain.collectives.handles import Finished
from drivetrain_local.warm_up import WarmUp, average_gradients
from local_workers import Blocks, ByHand, Rounds, batch, fragment_of, loss_of
from resumed_workers import check_same_bits

EXACT = 1e-12
ROUNDS = Rounds(every=3, warmup_steps=4)


def adamw(model):
    return AdamW(model.parameters(), lr=0.01)


def local(rounds, inner="ddp", workers="ranks", **options):
    return {"name": "local", "inner": inner, "workers": workers, **asdict(rounds), **options}


def hosts(monkeypatch):
    """Let four ranks believe in two hosts."""
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // 2))


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "checkpoint")


class Training:
    """A model under some strategy, and its steps."""

    def __init__(self, strategy, model=None, make=adamw, links=None, **options):
        config = {"strategy": strategy, "links": {"far": links or {}}, **options}
        self.accelerator = Accelerator(config=config, cpu=True)
        model = model or Blocks()
        self.model, self.optimizer = self.accelerator.prepare(model, make(model))
        self.rank = self.accelerator.process_index
        self.norms = []

    @property
    def strategy(self):
        return self.accelerator.strategy_of(self.model)

    def run(self, first, last, *, micro_batches=1, clip=None, weighted=False, loss=loss_of):
        for step in range(first, last):
            for micro in range(micro_batches):
                with self.accelerator.accumulate(self.model):
                    inputs = batch(step * micro_batches + micro, self.rank)
                    weight = 1.0 + self.rank + micro if weighted else None
                    self.accelerator.backward(loss(self.model, inputs), weight=weight)
                    if clip is not None and self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                        self.norms.append(norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return self

    def outer(self):
        return self.accelerator.get_state_dict(self.model)

    def own(self):
        with self.accelerator.gathered(self.model):
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def close(self):
        self.accelerator.free_memory()


def check_equal(found, expected):
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=EXACT, atol=EXACT)


def check_alike_on_all_ranks(state):
    for name, value in state.items():
        first = value.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["ddp", "plain", "zero1", "zero2", "zero3", "fsdp"])
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
    warm.close()
    exact.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["ddp", "zero1"])
def test_weighted_losses(monkeypatch, inner):
    hosts(monkeypatch)
    options = {"accumulation": 2}
    warm = Training(local(ROUNDS, inner, "hosts"), **options)
    exact = Training("ddp", **options)
    for each in (warm, exact):
        each.run(0, 3, micro_batches=2, weighted=True)
    check_equal(warm.outer(), exact.outer())
    warm.close()
    exact.close()


@pytest.mark.ranks(4)
def test_streaming_begins_its_rounds_after_the_warm_up(monkeypatch):
    hosts(monkeypatch)
    rounds = Rounds(every=4, fragments=2, delay=1, keep=0.5, warmup_steps=3)
    warm = Training(local(rounds, "zero1", "hosts")).run(0, 9)
    check_equal(warm.outer(), ByHand(2, 2, rounds, adamw, fragment_of).train(9))
    warm.close()


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


class Branches(Blocks):
    """Blocks, a branch that some ranks leave out, a branch that all do, and a running mean."""

    def __init__(self):
        super().__init__()
        self.some, self.none = (nn.Linear(3, 3).double() for _ in range(2))
        self.norm = nn.BatchNorm1d(3).double()


def branching(model, inputs):
    """Return a loss; ranks of the second host leave out a branch."""
    output = model.norm(Blocks.forward(model, inputs))
    output = model.some(output) if dist.get_rank() < dist.get_world_size() // 2 else output
    return output.square().mean()


def momentum(model):
    return SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["ddp", "zero1", "plain"])
def test_gradients_that_a_host_lacks_and_buffers(monkeypatch, inner):
    hosts(monkeypatch)
    warm = Training(local(ROUNDS, inner, "hosts"), Branches(), momentum)
    exact = Training("ddp", Branches(), momentum)
    for each in (warm, exact):
        each.run(0, 3, loss=branching)
    found, expected, start = warm.outer(), exact.outer(), Branches().state_dict()
    check_equal(found, expected)
    assert torch.equal(found["none.weight"], start["none.weight"]), "nobody had a gradient"
    assert not torch.equal(found["some.weight"], start["some.weight"])
    check_alike_on_all_ranks(dict(warm.model.named_buffers()))
    warm.close()
    exact.close()


@pytest.mark.ranks(2)
def test_a_loss_of_two_models():
    """The strategy of one of them runs backward; the other one's gradients are averaged, too."""
    weights = []
    for strategy in (local(ROUNDS), "ddp"):
        training = Training(strategy)
        other = nn.Linear(3, 2).double()
        with torch.no_grad():
            other.weight.fill_(0.3)
            other.bias.fill_(0.1)
        other, optimizer = training.accelerator.prepare(other, SGD(other.parameters(), lr=0.1))
        for step in range(3):
            hidden = other(batch(step, training.rank)[:, :3])
            loss = (
                training.model(batch(step, training.rank)).square().mean() + hidden.square().sum()
            )
            training.accelerator.backward(loss)
            for each in (training.optimizer, optimizer):
                each.step()
                each.zero_grad()
        weights.append({**training.outer(), **training.accelerator.get_state_dict(other)})
        training.close()
    check_equal(*weights)


@pytest.mark.ranks(2)
def test_ranks_step_together_in_the_warm_up_and_apart_afterwards():
    warm = Training(local(ROUNDS), check_replicas_every=1, on_nonfinite="skip")
    assert not warm.strategy.steps_apart
    warm.run(0, 2, clip=1.0)

    def infinite(model, inputs):
        return loss_of(model, inputs) * (float("inf") if dist.get_rank() == 1 else 1.0)

    before = warm.own()
    warm.run(2, 3, clip=1.0, loss=infinite)
    check_same_bits(warm.own(), before)  # all ranks have skipped the step
    warm.run(3, 4, clip=1.0)
    assert not warm.strategy.steps_apart
    warm.run(4, 5, clip=1.0)  # the fourth step, which is the last of the warm-up
    assert warm.strategy.steps_apart
    check_alike_on_all_ranks(warm.own())
    warm.run(5, 6)
    own = warm.own()["last.weight"]
    assert not torch.equal(own, warm.accelerator.reduce(own, "mean"))
    warm.close()


@pytest.mark.ranks(2)
def test_methods_for_links_leave_the_warm_up_exact():
    links = {"gradients": "int4"}
    found = Training(local(ROUNDS), links=links).run(0, 4)
    exact = Training("ddp").run(0, 4)
    check_equal(found.outer(), exact.outer())
    found.close()
    exact.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at", [2, 4, 5])
@pytest.mark.parametrize("inner", ["ddp", "zero1"])
def test_checkpoints_go_on_bit_for_bit(folder, inner, at):
    straight = Training(local(ROUNDS, inner)).run(0, at)
    straight.accelerator.save_state(folder)
    straight.run(at, 9)
    resumed = Training(local(ROUNDS, inner)).run(20, 26)  # other state, in a round
    resumed.accelerator.load_state(folder)
    assert resumed.strategy.steps_apart is (at >= 4)
    resumed.run(at, 9)
    check_same_bits(resumed.outer(), straight.outer())
    check_same_bits(resumed.own(), straight.own())
    straight.close()
    resumed.close()


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
    assert two.strategy.steps_apart
    four.close()
    two.close()


@pytest.mark.ranks(2)
def test_a_checkpoint_of_the_warm_up_is_one_of_any_strategy(folder):
    warm = Training(local(ROUNDS)).run(0, 2)
    keys = {shard.state for shard in warm.strategy.shards()}
    assert all("@" not in key for key in keys), keys
    warm.accelerator.save_state(folder)
    exact = Training("ddp")
    exact.accelerator.load_state(folder)
    warm.run(2, 4)
    check_equal(exact.run(2, 4).outer(), warm.outer())
    warm.close()
    exact.close()


@pytest.mark.ranks(2)
def test_the_last_worker_counts_the_steps_of_the_warm_up(folder):
    """A host is lost, and comes back: the workers do not warm up again."""
    two = Training(local(ROUNDS)).run(0, 3)
    two.accelerator.save_state(folder)
    one = Training(local(ROUNDS, workers="hosts"))  # both ranks are on one host
    assert not one.strategy.steps_apart
    one.accelerator.load_state(folder)
    one.run(3, 6)
    one.accelerator.save_state(folder, overwrite=True)
    two.accelerator.load_state(folder)
    assert two.strategy.steps_apart
    check_same_bits(two.outer(), one.outer())
    one.close()
    two.close()


@pytest.mark.ranks(2)
def test_a_longer_warm_up_does_not_stop_workers_that_have_parted(folder):
    parted = Training(local(replace(ROUNDS, warmup_steps=0))).run(0, 4)
    parted.accelerator.save_state(folder)
    longer = Training(local(replace(ROUNDS, warmup_steps=20)))
    longer.accelerator.load_state(folder)
    assert longer.strategy.steps_apart
    before = longer.outer()
    longer.run(4, 7)  # a new round: it ends after three steps
    assert not torch.equal(longer.outer()["last.bias"], before["last.bias"])
    parted.close()
    longer.close()


@pytest.mark.ranks(2)
def test_late_workers_are_waited_for_in_the_warm_up():
    late = Training(local(ROUNDS, late_s=60.0))
    assert late.strategy.steps_with is None
    late.run(0, 4)
    exact = Training("ddp").run(0, 4)
    check_equal(late.outer(), exact.outer())
    assert late.strategy.steps_with is not None
    late.run(4, 8)
    check_equal(late.outer(), ByHand(2, 1, ROUNDS, adamw).train(8))
    late.close()
    exact.close()


@pytest.mark.ranks(2)
def test_late_workers_cannot_skip_steps_and_the_first_step_says_so():
    late = Training(local(ROUNDS, late_s=60.0), on_nonfinite="skip")
    with pytest.raises(ConfigError, match="on_nonfinite: expected stop or ignore"):
        late.run(0, 1)
    late.close()
