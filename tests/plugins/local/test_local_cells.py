"""Workers whose ranks share a replica, against workers by hand in one process."""

import os
from dataclasses import asdict

import pytest
import torch
from torch.optim import AdamW

from cell_workers import TiedWords, loss_by_hand, word_batch, word_fragment, word_loss
from drivetrain import Accelerator, ConfigError
from drivetrain.cost import ModelSpec
from local_workers import ByHand, Rounds

EXACT = 1e-11
ONCE, STREAMING = Rounds(every=3), Rounds(every=4, fragments=2, delay=3, keep=0.5)
WARMED = Rounds(every=3, warmup_steps=2)
TP, PP = {"name": "megatron", "tp": 2}, {"name": "megatron", "pp": 2}


def adamw(model):
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def hosts(monkeypatch, per_host):
    """Let ranks believe in hosts: a host's name has torchrun's number of the host as a part."""
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // per_host))


class Training:
    """A model under local steps, and its steps."""

    def __init__(self, inner, rounds, links=None, clip=None, model=None, **options):
        strategy = {"name": "local", "inner": inner, **asdict(rounds)}
        config = {"strategy": strategy, "links": {"far": links or {}}}
        self.accelerator = Accelerator(config=config, cpu=True, **options)
        self.whole = model or TiedWords()
        self.model, self.optimizer = self.accelerator.prepare(self.whole, adamw(self.whole))
        self.clip, self.losses, self.norms = clip, [], []
        self.place = self.accelerator.mesh["dp"].rank

    def run(self, first, last):
        for step in range(first, last):
            with self.accelerator.accumulate(self.model):
                self.backward(word_batch(step, self.place))
                if self.clip is not None and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()

    def backward(self, ids):
        loss = self.accelerator.pipeline_step(self.model, ids, ids, loss_fn=word_loss)
        self.losses.append(float(loss.detach()))

    def outer(self):
        return self.accelerator.get_state_dict(self.model)

    def own(self):
        with self.accelerator.gathered(self.model):
            return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def check_tensor_ranks_alike(self):
        """Compare what all ranks of ``tp`` hold whole, bit for bit."""
        whole = {name: tuple(p.shape) for name, p in TiedWords().named_parameters()}
        for name, parameter in self.model.named_parameters():
            if tuple(parameter.shape) == whole[name]:
                mine = parameter.detach().clone()
                everyone = self.accelerator.gather(mine.reshape(1, -1))
                place, size = self.accelerator.process_index, self.accelerator.num_processes
                assert len(everyone) == size
                neighbor = everyone[place ^ 1].view(mine.shape)
                assert torch.equal(mine, neighbor), name

    def close(self):
        self.accelerator.free_memory()


class PlainLoop(Training):
    """The script computes the loss itself, outside of the model."""

    def backward(self, ids):
        loss = word_loss(self.model(ids), ids)
        self.accelerator.backward(loss)
        self.losses.append(float(loss.detach()))


def by_hand(workers, ranks, rounds, **options):
    words = {"build": TiedWords, "batch": word_batch, "loss": loss_by_hand}
    fragment_of = word_fragment if rounds.fragments > 1 else lambda name: 0
    return ByHand(workers, ranks, rounds, adamw, fragment_of, **words, **options)


def check_close(found, expected):
    assert set(expected) <= set(found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=EXACT, atol=EXACT)


def check_same_bits(found, expected):
    assert list(found) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


CELLS = {
    "tp": (4, 1, TP),
    "sequence parallel": (4, 1, {**TP, "sequence_parallel": True}),
    "pp": (4, 1, PP),
    "one rank": (4, 2, {"name": "megatron"}),
    "tp, zero1": (8, 2, {**TP, "data_parallel": "zero1"}),
    "pp, dp": (8, 2, PP),
    "tp, pp": (8, 1, {**TP, "pp": 2}),
}


@pytest.mark.parametrize(
    ("ranks", "inner"),
    [
        pytest.param(ranks, inner, marks=pytest.mark.ranks(size, timeout=240), id=name)
        for name, (size, ranks, inner) in CELLS.items()
    ],
)
@pytest.mark.parametrize(
    "rounds", [ONCE, STREAMING, WARMED], ids=["all at once", "streaming", "warm-up"]
)
def test_two_hosts(monkeypatch, ranks, inner, rounds):
    hosts(monkeypatch, torch.distributed.get_world_size() // 2)
    training = Training(inner, rounds, clip=0.5)
    training.run(0, 9)
    expected = by_hand(2, ranks, rounds, clip=0.5)
    check_close(training.outer(), expected.train(9))
    worker = training.place // ranks
    check_close(
        training.own(),
        {n: p for n, p in expected.models[worker].named_parameters() if n in training.own()},
    )
    torch.testing.assert_close(training.norms, expected.norms[worker], rtol=EXACT, atol=EXACT)
    if not rounds.warmup_steps:
        losses = expected.losses[training.place]
        torch.testing.assert_close(training.losses, losses, rtol=EXACT, atol=EXACT)
    training.close()
