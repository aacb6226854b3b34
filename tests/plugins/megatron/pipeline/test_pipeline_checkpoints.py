"""Checkpoints of pipelines: saved by one division, loaded by another, and training goes on."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from drivetrain import Accelerator
from huggingface_models import VOCABULARY, gpt2, logits_of, token_batch

SAVED, LAST = 1, 2
TURNS = {"pp": 2, "chunks": 2, "schedule": "interleaved", "micro_batches": 2}
DIVISIONS = {
    "ddp": {"name": "ddp"},
    "pp4": {"name": "megatron", "pp": 4, "micro_batches": 2},
    "zero3": {"name": "zero3", "keep_below": 0},
    "interleaved": {"name": "megatron", **TURNS},
    "tp2-pp2": {"name": "megatron", "tp": 2, "pp": 2, "micro_batches": 2},
    "pp2-zero1": {"name": "megatron", "pp": 2, "micro_batches": 2, "data_parallel": "zero1"},
}
"""Of four ranks; each loads what the one before it has saved."""


def loss_of(output, targets):
    return F.cross_entropy(logits_of(output).view(-1, VOCABULARY), targets.reshape(-1))


def made():
    torch.manual_seed(3)
    model = gpt2(4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


class Trained:
    """A model under a division; ranks of a data-parallel axis share the rows of a batch."""

    def __init__(self, division):
        self.accelerator = Accelerator(strategy=DIVISIONS[division], cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(*made())

    def steps(self, first, last):
        dp = self.accelerator.mesh["dp"]
        for step in range(first, last):
            ids = token_batch(step, rows=8)[dp.rank :: dp.size]
            self.accelerator.pipeline_step(self.model, ids, ids, loss_fn=loss_of)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def check(self, expected, where):
        with self.accelerator.gathered(self.model):
            for name, parameter in self.model.named_parameters():
                close = torch.isclose(parameter, expected[name], rtol=1e-10, atol=1e-12)
                assert close.all(), f"{where}: {name}"


def uninterrupted():
    """Return the weights of one process when the others save, and at the end."""
    model, optimizer = made()
    kept = []
    for step in range(LAST):
        ids = token_batch(step, rows=8)
        loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return kept[SAVED - 1], kept[-1]


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_each_division_goes_on_with_the_checkpoint_of_another(tmp_path):
    saved, last = uninterrupted()
    for name in DIVISIONS:
        trained = Trained(name)
        trained.steps(0, SAVED)
        trained.check(saved, name)
        trained.accelerator.save_state(tmp_path / name)
        trained.accelerator.free_memory()
    for saver, name in itertools.pairwise([*DIVISIONS, "ddp"]):
        trained = Trained(name)
        trained.accelerator.load_state(tmp_path / saver)
        where = f"saved by {saver}, loaded by {name}"
        trained.check(saved, where)
        trained.steps(SAVED, LAST)
        trained.check(last, where)
        trained.accelerator.free_memory()
