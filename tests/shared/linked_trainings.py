"""Trainings over emulated hosts with methods for the links between them, and their bytes."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec

WIDTH, ROWS = 64, 8

BUCKETS = {"bucket_mib": 0.02, "first_bucket_mib": 0.02}
FORMS: Mapping[str, Mapping[str, object]] = {
    "ddp in buckets": {"name": "ddp", **BUCKETS},
    "zero2 in buckets": {"name": "zero2", "bucket_mib": 0.02},
    "zero3 divided": {"name": "zero3", "keep_below": 0},
    "zero3 secondary": {"name": "zero3", "secondary": "host"},
    "fsdp hybrid": {"name": "fsdp", "sharding": "hybrid"},
    "fsdp secondary": {"name": "fsdp", "secondary": "host"},
    "megatron zero2": {"name": "megatron", "data_parallel": "zero2"},
}
"""Strategies with options; all others are by their names."""


def model_of() -> nn.Sequential:
    """Return a model of two matrices that methods approximate, and one that is too small."""
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, 3))


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.5, momentum=0.9)


def spread(monkeypatch: pytest.MonkeyPatch, per_host: int = 1) -> int:
    """Let ranks believe in hosts of so many ranks, whose names have torchrun's number as a part.

    Return the rank.
    """
    rank = int(os.environ["RANK"])
    monkeypatch.setenv("GROUP_RANK", str(rank // per_host))
    return rank


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


class Training:
    """A model under a strategy; ``links`` are options of that section of a configuration."""

    def __init__(
        self,
        form: str,
        make: Callable[[], nn.Module] = model_of,
        project_dir: Path | None = None,
        on_nonfinite: str = "stop",
        **links: object,
    ) -> None:
        config = {"strategy": FORMS.get(form, form), "links": links, "on_nonfinite": on_nonfinite}
        self.accelerator = Accelerator(config=config, cpu=True, project_dir=project_dir)
        self.rank = self.accelerator.process_index
        model = make()
        self.spec = ModelSpec.of(model, states=1)
        self.model, self.optimizer = self.accelerator.prepare(model, sgd(model))
        self.step = 0

    @property
    def strategy(self):
        return self.accelerator.strategy_of(self.model)

    @property
    def links(self):
        return self.strategy.run.links

    def loss(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).square().mean()

    def train(self, steps: int = 1) -> Self:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.accelerator.backward(self.loss(batch(self.step, self.rank)))
            self.optimizer.step()
            self.step += 1
        return self

    def state(self) -> dict[str, Tensor]:
        found = self.accelerator.get_state_dict(self.model)
        return {name: value.clone() for name, value in found.items()}

    def check_sent(self) -> Mapping[tuple[str, str], int]:
        """Compare the bytes of two steps of rank 0 with the promise, and return the promise."""
        strategy = self.strategy
        promised = type(strategy).cost(strategy.config, self.spec, strategy.run).sent
        before = self.accelerator.traffic.sent()
        self.train(2)
        after = self.accelerator.traffic.sent()
        if self.rank == 0:
            sent = {key: (after[key] - before.get(key, 0)) / 2 for key in after}
            assert {key: count for key, count in sent.items() if count} == promised
        return promised

    def end(self) -> None:
        self.accelerator.free_memory()
