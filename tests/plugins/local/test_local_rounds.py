"""Local steps against workers by hand in one process: weights, norms, windows, schedules."""

import os
from dataclasses import asdict

import pytest
import torch
from torch.optim import SGD, AdamW, Muon

from drivetrain import Accelerator, ConfigError
from drivetrain.facade import settings
from local_workers import Blocks, ByHand, Rounds, batch, fragment_of, loss_of

EXACT = 1e-12


def adamw(model):
    return AdamW(model.parameters(), lr=0.01)


def sgd(model):
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def hosts(monkeypatch, per_host):
    """Let ranks believe in hosts: a host's name has torchrun's number of the host as a part."""
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // per_host))


def accelerator_of(rounds, *, inner="ddp", workers="hosts", **options):
    strategy = {"name": "local", "inner": inner, "workers": workers, **asdict(rounds)}
    return Accelerator(strategy=strategy, cpu=True, **options)


def trained(accelerator, make, steps, *, micro_batches=1, clip=None):
    model = Blocks()
    model, optimizer = accelerator.prepare(model, make(model))
    for step in range(steps * micro_batches):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch(step, accelerator.process_index)))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


def check_equal(found, expected):
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=EXACT, atol=EXACT)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["ddp", "plain", "zero1", "zero3", "fsdp"])
def test_two_hosts_of_two_ranks(monkeypatch, inner):
    hosts(monkeypatch, 2)
    rounds = Rounds(every=3)
    accelerator = accelerator_of(rounds, inner=inner)
    model = trained(accelerator, adamw, 7)
    check_equal(accelerator.get_state_dict(model), ByHand(2, 2, rounds, adamw).train(7))
    accelerator.free_memory()


@pytest.mark.ranks(3)
def test_ranks_as_workers_with_windows_and_clipping():
    rounds = Rounds(every=2, outer_lr=0.5, outer_momentum=0.8)
    accelerator = accelerator_of(rounds, workers="ranks", gradient_accumulation_steps=2)
    model = trained(accelerator, sgd, 5, micro_batches=2, clip=0.5)
    by_hand = ByHand(3, 1, rounds, sgd, clip=0.5)
    check_equal(accelerator.get_state_dict(model), by_hand.train(5, micro_batches=2))
    accelerator.free_memory()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["zero1", "ddp", "zero3"])
def test_fragments_in_turn_beside_training(monkeypatch, inner):
    hosts(monkeypatch, 2)
    rounds = Rounds(every=4, fragments=2, delay=3, keep=0.5)
    accelerator = accelerator_of(rounds, inner=inner)
    model = trained(accelerator, adamw, 9)
    by_hand = ByHand(2, 2, rounds, adamw, fragment_of)
    check_equal(accelerator.get_state_dict(model), by_hand.train(9))
    worker = by_hand.models[accelerator.process_index // 2]
    with accelerator.gathered(model):  # in the middle of a round: the worker's own weights
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
    check_equal(own, dict(worker.named_parameters()))
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_fragments_without_delay():
    rounds = Rounds(every=5, fragments=3)
    accelerator = accelerator_of(rounds, workers="ranks")
    model = trained(accelerator, sgd, 8)
    by_hand = ByHand(2, 1, rounds, sgd, lambda name: fragment_of(name, 3))
    check_equal(accelerator.get_state_dict(model), by_hand.train(8))
    accelerator.free_memory()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [4, 12], ids=["one round", "three rounds"])
def test_muloco(steps):
    """Muon for matrices, and AdamW for everything else: each optimizer has rounds of its own."""
    rounds = Rounds(every=4)
    accelerator = accelerator_of(rounds, workers="ranks")
    model, by_hand = Blocks(), ByHand(2, 1, rounds, two_of)
    model, *optimizers = accelerator.prepare(model, *two_of(model).optimizers)
    for step in range(steps):
        accelerator.backward(loss_of(model, batch(step, accelerator.process_index)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = accelerator.get_state_dict(model), by_hand.train(steps)
    if steps == 4:
        check_equal(found, expected)
    else:
        # Muon computes in bf16, which makes last bits of the first round larger.
        moved = distance(expected, Blocks().state_dict())
        assert distance(found, expected) < 2**-8 * moved, distance(found, expected) / moved
    accelerator.free_memory()


def distance(one, other):
    return torch.cat([(one[name] - other[name]).flatten() for name in one]).norm()


class Both:
    """Two optimizers that step together."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for each in self.optimizers:
            each.step()

    def zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()


def two_of(model):
    ends = [*model.first.parameters(), *model.last.parameters()]
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    ends += [p for p in model.blocks.parameters() if p.dim() != 2]
    return Both(Muon(matrices, lr=0.05), AdamW(ends, lr=0.01))


@pytest.mark.ranks(4)
def test_edits_of_weights_in_the_middle_of_a_round(monkeypatch):
    hosts(monkeypatch, 2)
    accelerator = accelerator_of(Rounds(every=5), inner="zero1")
    model = trained(accelerator, adamw, 2)
    before = accelerator.get_state_dict(model)
    with accelerator.gathered(model):
        if accelerator.is_main_process:
            with torch.no_grad():
                model.last.bias.fill_(3.0)
    after = accelerator.get_state_dict(model)
    assert (after.pop("last.bias") == 3).all()
    before.pop("last.bias")
    check_equal(after, before)
    with accelerator.gathered(model):
        assert (model.last.bias == 3).all()
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_one_host_trains_as_the_strategy_inside():
    accelerator = accelerator_of(Rounds(every=2))
    exact = Accelerator(strategy="ddp", cpu=True)
    found, expected = (trained(each, adamw, 3) for each in (accelerator, exact))
    check_equal(accelerator.get_state_dict(found), exact.get_state_dict(expected))
    accelerator.free_memory()
    exact.free_memory()


@pytest.mark.ranks(2)
def test_the_log_says_that_workers_of_one_host_exchange_by_a_method(monkeypatch):
    said = []
    monkeypatch.setattr(settings.logger, "announce", said.append)
    links = {"links": {"far": {"gradients": "int8"}}}
    for workers in ("ranks", "hosts"):
        accelerator = Accelerator(
            config={"strategy": {"name": "local", "workers": workers}, **links}, cpu=True
        )
        trained(accelerator, adamw, 0)
        accelerator.free_memory()
    apart, alone = (line for line in said if line.startswith("between hosts: "))
    assert apart.endswith("gradients int8 (theory), parameters exact")
    assert alone.endswith("; all ranks are on one host, so that nothing is approximate")


@pytest.mark.ranks(2)
def test_a_sparse_method_with_outer_momentum_is_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr("drivetrain_local.strategy.logger.warning", said.append)
    for method, momentum, lines in (("topk", 0.9, 1), ("topk", 0.0, 0), ("int4", 0.9, 0)):
        strategy = {"name": "local", "workers": "ranks", "outer_momentum": momentum}
        links = {"far": {"gradients": method}}
        accelerator = Accelerator(config={"strategy": strategy, "links": links}, cpu=True)
        trained(accelerator, adamw, 0)
        assert len(said) == lines, (method, momentum)
        said.clear()
        accelerator.free_memory()


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 2, "fragments": 3}, "strategy.fragments: expected at most the 2 steps"),
        ({"every": 2, "delay": 2}, "strategy.delay: expected fewer steps than the 2"),
        ({"inner": {"name": "megatron", "tp": 2}}, "a multiple of tp x pp = 2 x 1"),
        ({"every": 0}, "every"),
        ({"keep": 2.0}, "keep"),
        ({"workers": "racks"}, "workers"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ConfigError, match=message):
        accelerator = Accelerator(strategy={"name": "local", **options}, cpu=True)
        accelerator.prepare(Blocks())
