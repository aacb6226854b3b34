"""Trainings of the blocks of ``local_workers`` under local steps, or another strategy."""

import os
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.optim import AdamW

from drivetrain import Accelerator
from local_workers import Blocks, batch, loss_of

EXACT = 1e-12


def adamw(model):
    return AdamW(model.parameters(), lr=0.01)


def local(rounds, inner="ddp", workers="ranks", **options):
    return {"name": "local", "inner": inner, "workers": workers, **asdict(rounds), **options}


def hosts(monkeypatch):
    """Let each two ranks believe in a host: its name has torchrun's number of it as a part."""
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // 2))


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
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def check_alike_on_all_ranks(state):
    for name, value in state.items():
        first = value.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), name
