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
    TiedWords,
    emulate_hosts,
    wide_words,
    words_by_hand,
)
from drivetrain import Accelerator, ConfigError
from drivetrain.cost import ModelSpec
from drivetrain.model.modules import held_parameters
from local_workers import Rounds

pytestmark = pytest.mark.ranks(4)

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
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def check_against(training, by_hand, steps):
    """Train both, and compare outer weights, the worker's own weights, losses and norms."""
    micro_batches = training.accelerator.gradient_accumulation_steps
    training.run(0, steps * micro_batches)
    outer = training.outer()
    assert outer["last.weight"] is outer["first.weight"]
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


@pytest.mark.parametrize("inner", [TP, PP], ids=["tp", "pp"])
@pytest.mark.parametrize("method", ["exact", "int8"])
def test_bytes_of_a_round(monkeypatch, inner, method):
    emulate_hosts(monkeypatch, 2)
    rounds = Rounds(every=4, fragments=2, delay=1, keep=0.5)
    training = CellTraining(inner, rounds, links={"gradients": method}, model=wide_words())
    training.run(0, 8)
    training.outer()  # ends an exchange under way
    training.accelerator.traffic.clear()
    training.run(8, 12)
    sent = training.accelerator.traffic.sent().items()
    strategy = training.accelerator.strategy_of(training.model)
    cost = type(strategy).cost(strategy.config, ModelSpec.of(wide_words()), strategy.run)
    far = {key: -(-count // rounds.every) for key, count in sent if key[0] == "dp.far" and count}
    if training.accelerator.is_main_process:
        assert far == {key: count for key, count in cost.sent.items() if key[0] == "dp.far"}
    outer = [p for p in held_parameters(training.model) if p.requires_grad]
    assert cost.held["outer"] >= 2 * sum(p.untyped_storage().nbytes() for p in outer)


REFUSED = [
    ({"inner": TP, "workers": "ranks"}, "strategy.workers: expected hosts"),
    ({"inner": TP, "late_s": 5}, "strategy.late_s: expected a strategy inside over"),
    ({"inner": {"name": "megatron", "tp": 3}}, "a multiple of tp x pp = 3 x 1"),
    ({"inner": {"name": "megatron", "tp": 2, "pp": 2}}, "expected hosts that hold whole"),
]


def test_refused(monkeypatch):
    emulate_hosts(monkeypatch, 2)
    for options, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            accelerator = Accelerator(strategy={"name": "local", **options}, cpu=True)
            accelerator.prepare(TiedWords())
