"""Local steps by hand, in one process: workers one after the other, and the outer step in words."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stacks import Residual, Stack

WIDTH, ROWS = 6, 4


class Blocks(Stack):
    """Some blocks between two layers, in fp64."""

    def __init__(self, blocks: int = 3) -> None:
        torch.manual_seed(11)
        first, last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        layers = (Residual(WIDTH, norm=nn.LayerNorm) for _ in range(blocks))
        super().__init__(layers, first=first, last=last)
        self.double()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs[:, :3].roll(1, 1)).square().mean()


@dataclass
class Rounds:
    """The knobs of ``local``, under its names."""

    every: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    keep: float = 0.0
    warmup_steps: int = 0


@dataclass
class ByHand:
    """Workers of some ranks each, trained by one process.

    Args:
        workers: how many.
        ranks: of each.
        rounds: the knobs.
        make: makes the optimizer of a worker.
        fragment_of: the fragment of a parameter, by name.
        clip: largest norm of a worker's gradients; in the warm-up, of the mean over all ranks.
        present: who takes part in the exchanges after so many steps; all where nothing is said.
        build: makes the model.
        batch: gives the batch of a step and a rank.
        loss: of a model and a batch.

    Attributes:
        losses: of each rank; in the warm-up every worker computes those of all ranks.
        norms: of each worker, where gradients are clipped.
    """

    workers: int
    ranks: int
    rounds: Rounds
    make: Callable[[nn.Module], Optimizer]
    fragment_of: Callable[[str], int] = lambda name: 0
    clip: float | None = None
    present: Mapping[int, Sequence[int]] = field(default_factory=dict)
    build: Callable[[], nn.Module] = Blocks
    batch: Callable[[int, int], Tensor] = batch
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of
    models: Sequence[nn.Module] = field(init=False)
    losses: list[list[float]] = field(init=False)
    norms: list[list[float]] = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.models = [self.build() for _ in range(self.workers)]
        self.optimizers = [self.make(model) for model in self.models]
        self.outer = {n: p.detach().clone() for n, p in self.models[0].named_parameters()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.outer.items()}
        self.losses = [[] for _ in range(self.workers * self.ranks)]
        self.norms = [[] for _ in range(self.workers)]
        self.sent: dict[int, dict[str, Tensor]] = {}

    def train(self, steps: int, micro_batches: int = 1) -> Mapping[str, Tensor]:
        for _ in range(steps):
            for worker, model in enumerate(self.models):
                self.inner_step(worker, model, micro_batches)
            self.steps += 1
            local = self.steps - self.rounds.warmup_steps
            if local <= 0:
                self.outer = {n: p.detach().clone() for n, p in self.models[0].named_parameters()}
                continue
            for fragment in range(self.rounds.fragments):
                place = fragment * self.rounds.every // self.rounds.fragments
                ago = (local - place) % self.rounds.every
                if ago == 0:
                    everyone = range(self.workers)
                    workers = self.present.get(self.steps, everyone)
                    self.sent[fragment] = self.outer_gradients(fragment, workers)
                if ago == self.rounds.delay and fragment in self.sent:
                    self.outer_step(self.sent.pop(fragment))
        return copy.deepcopy(self.outer)

    def inner_step(self, worker: int, model: nn.Module, micro_batches: int) -> None:
        ranks = range(worker * self.ranks, (worker + 1) * self.ranks)
        if self.steps < self.rounds.warmup_steps:
            ranks = range(self.workers * self.ranks)
        for micro in range(micro_batches):
            for rank in ranks:
                inputs = self.batch(self.steps * micro_batches + micro, rank)
                loss = self.loss(model, inputs)
                (loss / len(ranks) / micro_batches).backward()
                self.losses[rank].append(float(loss.detach()))
        if self.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            self.norms[worker].append(float(norm))
        self.optimizers[worker].step()
        self.optimizers[worker].zero_grad()

    @torch.no_grad()
    def outer_gradients(self, fragment: int, workers: Sequence[int]) -> dict[str, Tensor]:
        named = [dict(self.models[worker].named_parameters()) for worker in workers]
        return {
            name: sum(outer - each[name] for each in named) / len(workers)
            for name, outer in self.outer.items()
            if self.fragment_of(name) == fragment
        }

    @torch.no_grad()
    def outer_step(self, gradients: Mapping[str, Tensor]) -> None:
        rounds = self.rounds
        for name, mean in gradients.items():
            self.momentum[name] = rounds.outer_momentum * self.momentum[name] + mean
            step = mean + rounds.outer_momentum * self.momentum[name]
            self.outer[name] = self.outer[name] - rounds.outer_lr * step
            for model in self.models:
                own = dict(model.named_parameters())[name]
                own.copy_(rounds.keep * own + (1 - rounds.keep) * self.outer[name])


def fragment_of(name: str, fragments: int = 2) -> int:
    """Return the fragment of a parameter of ``Blocks``: blocks in turn, ends with the ends."""
    first, _, rest = name.partition(".")
    if first == "blocks":
        return int(rest.partition(".")[0]) % fragments
    return 0 if first == "first" else fragments - 1
