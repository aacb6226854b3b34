"""Workers whose ranks share a replica, against workers by hand in one process."""

import os
from dataclasses import asdict

import pytest
import torch
from torch.optim import AdamW

from cell_workers import TiedWords, loss_by_hand, word_batch, word_fragment, word_loss
from drivetrain import Accelerator
from local_workers import ByHand, Rounds

EXACT = 1e-11
STREAMING = Rounds(every=4, fragments=2, delay=3, keep=0.5)


def adamw(model):
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def hosts(monkeypatch, per_host):
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // per_host))


def cell(**options):
    return {"name": "megatron", **options}


class Training:
    """A model under local steps, and its steps."""

    def __init__(self, inner, rounds, links=None, clip=None, model=None, **options):
        strategy = {"name": "local", "inner": inner, **asdict(rounds)}
        config = {"strategy": strategy, "links": {"far": links or {}}}
        self.accelerator = Accelerator(config=config, cpu=True, **options)
        model = model or TiedWords()
        self.model, self.optimizer = self.accelerator.prepare(model, adamw(model))
        self.clip, self.losses, self.norms = clip, [], []
        self.place = self.accelerator.mesh["dp"].rank

    def run(self, first, last):
        for step in range(first, last):
            with self.accelerator.accumulate(self.model):
                ids = word_batch(step, self.place)
                loss = self.accelerator.pipeline_step(self.model, ids, ids, loss_fn=word_loss)
                self.losses.append(float(loss.detach()))
                if self.clip is not None and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()

    def outer(self):
        return self.accelerator.get_state_dict(self.model)

    def own(self):
        with self.accelerator.gathered(self.model):
            return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def close(self):
        self.accelerator.free_memory()


def by_hand(workers, ranks, rounds, **options):
    words = {"build": TiedWords, "batch": word_batch, "loss": loss_by_hand}
    return ByHand(workers, ranks, rounds, adamw, word_fragment, **words, **options)


def check_close(found, expected):
    assert not set(expected) - set(found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=EXACT, atol=EXACT, msg=lambda m: f"{name}: {m}")


CELLS = {
    "tp": (4, {"tp": 2}),
    "sequence": (4, {"tp": 2, "sequence_parallel": True}),
    "dp": (4, {}),
    "pp": (4, {"pp": 2}),
}


@pytest.mark.parametrize(
    ("inner", "per_host"),
    [
        pytest.param(cell(**options), ranks // 2, marks=pytest.mark.ranks(ranks, timeout=180), id=name)
        for name, (ranks, options) in CELLS.items()
    ],
)
@pytest.mark.parametrize("rounds", [Rounds(every=3), STREAMING, Rounds(every=3, warmup_steps=2)], ids=["once", "streaming", "warm-up"])
def test_two_hosts_of_a_cell(monkeypatch, inner, per_host, rounds):
    hosts(monkeypatch, per_host)
    fragments = word_fragment if rounds.fragments > 1 else (lambda name: 0)
    training = Training(inner, rounds, clip=0.5)
    training.run(0, 9)
    expected = by_hand(2, per_host // (inner.get("tp", 1) * inner.get("pp", 1)), rounds, clip=0.5)
    expected.fragment_of = fragments
    outer = expected.train(9)
    check_close(training.outer(), outer)
    training.close()
