"""Workers whose ranks share a replica, against workers by hand in one process."""

import pytest
import torch
import torch.distributed as dist

from cell_workers import (
    ONCE,
    PP,
    STREAMING,
    TP,
    CellTraining,
    PlainLoop,
    TiedWords,
    emulate_hosts,
    wide_words,
    words_by_hand,
)
from drivetrain import Accelerator, ConfigError
from drivetrain.cost import ModelSpec
from local_workers import Rounds
from resumed_workers import check_same_bits

EXACT = 1e-11
WARMED = Rounds(every=3, warmup_steps=2)
CELLS = {
    "tp": (4, 1, TP),
    "sequence parallel": (4, 1, {**TP, "sequence_parallel": True}),
    "pp": (4, 1, PP),
    "one rank": (4, 2, {"name": "megatron"}),
    "tp, zero1": (8, 2, {**TP, "data_parallel": "zero1"}),
    "pp, dp": (8, 2, PP),
    "tp, pp": (8, 1, {**TP, "pp": 2}),
}


def check_close(found, expected):
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=EXACT, atol=EXACT)


def check_against(training, by_hand, steps):
    """Train both, and compare outer weights, the worker's own weights, losses and norms."""
    micro_batches = training.accelerator.gradient_accumulation_steps
    training.run(0, steps * micro_batches)
    outer = training.outer()
    assert outer["head.weight"] is outer["words.weight"]
    expected = by_hand.train(steps, micro_batches)
    check_close({name: outer[name] for name in expected}, expected)
    worker = training.place // by_hand.ranks
    check_close(training.own(), dict(by_hand.models[worker].named_parameters()))
    torch.testing.assert_close(training.norms, by_hand.norms[worker], rtol=EXACT, atol=EXACT)
    if not by_hand.rounds.warmup_steps:
        losses = by_hand.losses[training.place]
        torch.testing.assert_close(training.losses, losses, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    ("ranks", "inner"),
    [
        pytest.param(ranks, inner, marks=pytest.mark.ranks(size), id=name)
        for name, (size, ranks, inner) in CELLS.items()
    ],
)
@pytest.mark.parametrize(
    "rounds", [ONCE, STREAMING, WARMED], ids=["all at once", "streaming", "warm-up"]
)
def test_two_hosts(monkeypatch, ranks, inner, rounds):
    emulate_hosts(monkeypatch, dist.get_world_size() // 2)
    training = CellTraining(inner, rounds, clip=0.5)
    check_against(training, words_by_hand(2, ranks, rounds, clip=0.5), 9)
    training.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", [TP, PP], ids=["tp", "pp"])
@pytest.mark.parametrize("rounds", [STREAMING, WARMED], ids=["streaming", "warm-up"])
def test_windows_of_an_ordinary_loop(monkeypatch, inner, rounds):
    emulate_hosts(monkeypatch, 2)
    training = PlainLoop(inner, rounds, clip=0.5, gradient_accumulation_steps=2)
    check_against(training, words_by_hand(2, 1, rounds, clip=0.5), 5)
    training.close()


@pytest.mark.ranks(6)
@pytest.mark.parametrize("method", ["exact", "int4"])
def test_ranks_with_the_same_parameter_get_the_same_bits(monkeypatch, method):
    """Beside parts of other sizes, over three workers, whose sums depend on the order."""
    emulate_hosts(monkeypatch, 2)
    training = CellTraining(TP, STREAMING, links={"gradients": method}, model=wide_words())
    training.run(0, 5)
    shapes = {name: p.shape for name, p in wide_words().named_parameters()}
    whole = {n: p.detach() for n, p in training.model.named_parameters() if p.shape == shapes[n]}
    assert "positions.table" in whole
    assert "words.weight" not in whole
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, whole)
    check_same_bits(whole, everyone[dist.get_rank() ^ 1])
    training.close()


@pytest.mark.ranks(4)
def test_workers_have_masks_of_their_own(monkeypatch):
    emulate_hosts(monkeypatch, 2)
    training = CellTraining(TP, ONCE, model=TiedWords(dropout=0.5))
    training.place = 0  # all workers take the same batches
    training.run(0, 1)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, training.losses)
    assert everyone[0] == everyone[1]
    assert everyone[2] == everyone[3]
    assert everyone[0] != everyone[2]
    training.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("inner", "edited"),
    [(TP, "blocks.0.up.weight"), (PP, "blocks.0.up.weight"), (TP, "last.bias")],
    ids=["tp", "pp", "whole"],
)
def test_edits_in_the_middle_of_a_round(monkeypatch, inner, edited):
    emulate_hosts(monkeypatch, 2)
    training = CellTraining(inner, Rounds(every=5))
    training.run(0, 2)
    before = dict(training.outer())
    with training.accelerator.gathered(training.model):
        if training.accelerator.is_main_process:
            with torch.no_grad():
                training.model.get_parameter(edited).fill_(3.0)
    after = dict(training.outer())
    assert (after.pop(edited) == 3).all()
    before.pop(edited)
    check_same_bits(after, before)
    assert all((value == 3).all() for name, value in training.own().items() if name == edited)
    training.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", [TP, PP], ids=["tp", "pp"])
@pytest.mark.parametrize("method", ["exact", "int8"])
def test_bytes_of_a_round(monkeypatch, inner, method):
    emulate_hosts(monkeypatch, 2)
    rounds = Rounds(every=4, fragments=2, delay=1, keep=0.5)
    training = CellTraining(inner, rounds, links={"gradients": method}, model=wide_words())
    training.run(0, 8)
    training.outer()  # ends an exchange under way
    before = training.accelerator.traffic.sent()
    training.run(8, 12)
    after = training.accelerator.traffic.sent()
    strategy = training.accelerator.strategy_of(training.model)
    cost = type(strategy).cost(strategy.config, ModelSpec.of(wide_words()), strategy.run)
    sent = {key: -(-(after[key] - before.get(key, 0)) // rounds.every) for key in after}
    far = {key: count for key, count in sent.items() if key[0] == "dp.far" and count}
    if training.accelerator.is_main_process:
        assert far == {key: count for key, count in cost.sent.items() if key[0] == "dp.far"}
    outer = [p for p in training.model.parameters() if p.requires_grad]
    assert cost.held["outer"] >= 2 * sum(p.nbytes for p in outer)
    training.close()


REFUSED = {
    "ranks": ({"inner": TP, "workers": "ranks"}, "strategy.workers: expected hosts"),
    "late": ({"inner": TP, "late_s": 5}, "strategy.late_s: expected a strategy inside over"),
    "misfit": ({"inner": {"name": "megatron", "tp": 3}}, "a multiple of tp x pp = 3 x 1"),
    "far": ({"inner": {"name": "megatron", "tp": 2, "pp": 2}}, "expected hosts that hold whole"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refused(monkeypatch, options, message):
    emulate_hosts(monkeypatch, 2)
    with pytest.raises(ConfigError, match=message):
        accelerator = Accelerator(strategy={"name": "local", **options}, cpu=True)
        accelerator.prepare(TiedWords())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("inner", "advised"), [({"name": "ddp"}, True), (TP, False)])
def test_one_worker_is_advised_only_what_it_can_do(monkeypatch, inner, advised):
    said = []
    monkeypatch.setattr("drivetrain_local.strategy.logger.announce", said.append)
    training = CellTraining(inner, ONCE)
    (line,) = [line for line in said if "one worker of 2 ranks" in line]
    assert ("workers: ranks" in line) is advised
    training.close()
