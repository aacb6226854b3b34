"""Checkpoints of pipelines: saved by one division, loaded by another, and training goes on."""

import pytest
import torch
from torch.nn import functional as F

from drivetrain import Accelerator
from huggingface_models import VOCABULARY, gpt2, llama, logits_of, token_batch

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SAVED, LAST = 2, 4
MODELS = {"gpt2": lambda: gpt2(4), "llama": lambda: llama(4, kv_heads=2)}
DIVISIONS = {
    "ddp": (1, {"name": "ddp"}),
    "zero3": (2, {"name": "zero3", "keep_below": 0}),
    "tp4": (4, {"name": "megatron", "tp": 4}),
    "pp2": (2, {"name": "megatron", "pp": 2, "micro_batches": 2}),
    "pp3": (3, {"name": "megatron", "pp": 3, "micro_batches": 3}),
    "pp4": (4, {"name": "megatron", "pp": 4, "micro_batches": 2}),
    "tp2-pp2": (4, {"name": "megatron", "tp": 2, "pp": 2, "micro_batches": 2}),
    "interleaved": (
        2,
        {"name": "megatron", "pp": 2, "chunks": 2, "schedule": "interleaved", "micro_batches": 2},
    ),
    "pp2-zero1": (
        4,
        {"name": "megatron", "pp": 2, "micro_batches": 2, "data_parallel": {"name": "zero1"}},
    ),
}
WORLDS = [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 3, 4)]


def loss_of(output, targets):
    return F.cross_entropy(logits_of(output).view(-1, VOCABULARY), targets.reshape(-1))


class Trained:
    """A model under a division; ranks of a data-parallel axis share the rows of a batch."""

    def __init__(self, model, division):
        torch.manual_seed(3)
        module = MODELS[model]()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        self.accelerator = Accelerator(strategy=DIVISIONS[division][1], cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)

    def steps(self, first, last):
        dp = self.accelerator.mesh["dp"]
        for step in range(first, last):
            ids = token_batch(step, rows=12)[dp.rank :: dp.size]
            self.accelerator.pipeline_step(self.model, ids, ids, loss_fn=loss_of)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def check(self, expected, where):
        with self.accelerator.gathered(self.model):
            for name, parameter in self.model.named_parameters():
                torch.testing.assert_close(
                    parameter.detach(),
                    expected[name],
                    **EXACT,
                    msg=lambda m, name=name: f"{where} {name} {m}",
                )


def uninterrupted(model):
    """Return the weights of one process when the others save, and at the end."""
    torch.manual_seed(3)
    module = MODELS[model]()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    kept = []
    for step in range(LAST):
        ids = token_batch(step, rows=12)
        loss_of(module(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return kept[SAVED - 1], kept[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipelines")


EACH = pytest.mark.parametrize(
    "model", ["gpt2", pytest.param("llama", marks=pytest.mark.exhaustive)]
)


@pytest.mark.complete
@EACH
@pytest.mark.parametrize("world", WORLDS)
def test_save(folder, world, model):
    saved, _ = uninterrupted(model)
    for name in [name for name, (ranks, _) in DIVISIONS.items() if ranks == world]:
        trained = Trained(model, name)
        trained.steps(0, SAVED)
        trained.check(saved, name)
        trained.accelerator.save_state(folder / f"{model}-{name}")
        trained.accelerator.free_memory()


@pytest.mark.complete
@EACH
@pytest.mark.parametrize("world", WORLDS)
def test_load(folder, world, model):
    saved, last = uninterrupted(model)
    names = list(DIVISIONS)
    for index, name in enumerate(names):
        if DIVISIONS[name][0] != world:
            continue
        # Every fourth division, shifted: together the tests load each checkpoint twice or more.
        for saver in names[index % 4 :: 4]:
            trained = Trained(model, name)
            trained.accelerator.load_state(folder / f"{model}-{saver}")
            where = f"saved by {saver}, loaded by {name}:"
            trained.check(saved, where)
            trained.steps(SAVED, LAST)
            trained.check(last, where)
            trained.accelerator.free_memory()
