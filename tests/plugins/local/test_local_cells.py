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
from resumed_workers import check_same_bits, goes_on_bit_for_bit

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


# --- checkpoints of workers whose ranks share a replica ---


DDP, ZERO3 = {"name": "ddp"}, {"name": "zero3"}


@pytest.mark.parametrize(
    ("inner", "rounds", "at"),
    [
        pytest.param(inner, rounds, at, marks=pytest.mark.ranks(ranks), id=f"{name}, {at}")
        for ranks, name, inner, rounds, at in (
            (4, "tp", TP, STREAMING, 6),
            (4, "pp", PP, ONCE, 5),
            (8, "tp, zero1", {**TP, "data_parallel": "zero1"}, STREAMING, 6),
            (8, "tp, pp", {**TP, "pp": 2}, STREAMING, 6),
        )
    ],
)
def test_a_round_goes_on_bit_for_bit(monkeypatch, folder, inner, rounds, at):
    emulate_hosts(monkeypatch, dist.get_world_size() // 2)
    goes_on_bit_for_bit(folder, lambda: CellTraining(inner, rounds), at)


@pytest.mark.exhaustive
@pytest.mark.parametrize("inner", [TP, PP], ids=["tp", "pp"])
@pytest.mark.parametrize("method", ["int4", "powersgd"])
def test_kept_errors_go_on_bit_for_bit(monkeypatch, folder, inner, method):
    emulate_hosts(monkeypatch, 2)
    rounds, links, said = Rounds(every=2, fragments=2, delay=1), {"gradients": method}, []
    monkeypatch.setattr("drivetrain_local.state.logger.announce", said.append)
    goes_on_bit_for_bit(
        folder, lambda: CellTraining(inner, rounds, links=links, model=wide_words()), 5, 9
    )
    assert said == []  # nothing is left out, whichever rank goes on with it


def test_outer_weights_follow_what_a_script_writes(monkeypatch):
    emulate_hosts(monkeypatch, 2)
    training = CellTraining(TP, Rounds(every=2))
    training.run(0, 3)
    with training.accelerator.gathered(training.model):
        training.model.blocks[0].up.weight.data.fill_(3.0)
    assert training.outer()["blocks.0.up.weight"].eq(3.0).all()
    training.run(3, 4)
    assert training.outer()["blocks.0.up.weight"].sub(3.0).abs().max() < 0.5


def errors_of(training):
    """Return the sums of all ranks' errors, as a checkpoint gets them, by names of parameters."""
    found = {}
    for shard in training.accelerator.strategy_of(training.model).state.shards():
        if shard.state.startswith("links.error."):
            found[shard.name] = found.get(shard.name, 0) + shard.tensor.double().sum()
    names = sorted(name for name, _ in wide_words().named_parameters())
    sums = torch.tensor([float(found.get(name, 0)) for name in names], dtype=torch.float64)
    dist.all_reduce(sums)
    return dict(zip(names, sums.tolist(), strict=True))


def test_errors_of_parts_are_not_those_of_whole_parameters(monkeypatch, folder):
    """Another division goes on without them, and says so; whole parameters keep theirs."""
    emulate_hosts(monkeypatch, 2)
    links, rounds = {"gradients": "int4"}, Rounds(every=2)
    divided = CellTraining(TP, rounds, links=links, model=wide_words())
    divided.run(0, 5)
    divided.accelerator.save_state(folder)
    said = []
    monkeypatch.setattr("drivetrain_local.state.logger.announce", said.append)
    whole = CellTraining(DDP, rounds, links=links, model=wide_words())
    whole.accelerator.load_state(folder)
    assert [line.count("left out") for line in said] == [1]
    before, after = errors_of(divided), errors_of(whole)
    assert before["blocks.0.up.weight"] != 0
    assert after["blocks.0.up.weight"] == 0
    assert before["positions.table"] != 0
    expected = pytest.approx(before["positions.table"], rel=1e-6)
    assert after["positions.table"] == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [(TP, PP), (PP, TP), (TP, DDP), (ZERO3, TP), (ZERO3, PP)],
    ids=["tp to pp", "pp to tp", "tp to ddp", "zero3 to tp", "zero3 to pp"],
)
def test_another_strategy_inside_goes_on(monkeypatch, folder, saved, resumed):
    emulate_hosts(monkeypatch, 2)
    one, other = CellTraining(saved, STREAMING), CellTraining(resumed, STREAMING)
    one.run(0, 6)
    one.accelerator.save_state(folder)
    other.accelerator.load_state(folder)
    check_same_bits(other.outer(), one.outer())
    mine, theirs = other.own(), one.own()
    shared = [name for name in mine if name in theirs]
    assert shared
    check_same_bits({n: mine[n] for n in shared}, {n: theirs[n] for n in shared})
    other.run(6, 8)
    other.accelerator.save_state(folder, overwrite=True)
    one.accelerator.load_state(folder)
    check_same_bits(one.outer(), other.outer())
