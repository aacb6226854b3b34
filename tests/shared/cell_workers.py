"""Workers whose ranks share a replica: a model, its steps under local steps, and by hand."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from drivetrain import Accelerator
from local_workers import ByHand, Rounds
from stacks import Parts, Residual, Stack

WORDS, LENGTH, ROWS = 13, 6, 2
ONCE, STREAMING = Rounds(every=3), Rounds(every=4, fragments=2, delay=3, keep=0.5)
TP: Mapping[str, Any] = {"name": "megatron", "tp": 2}
PP: Mapping[str, Any] = {"name": "megatron", "pp": 2}


class TiedWords(Stack):
    """Blocks between an embedding and a head with its weights; uneven, frozen, 0-d parameters.

    Args:
        width: of hidden states.
        inner: of the layers inside of a block.
        dropout: probability.
        frozen: whether positions are.
        dtype: of all parameters.
    """

    def __init__(
        self,
        width: int = 8,
        inner: int = 6,
        *,
        dropout: float = 0.0,
        frozen: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        torch.manual_seed(13)
        ends = {"first": nn.Embedding(WORDS, width), "last": nn.Linear(width, WORDS, bias=False)}
        kinds = {"act": nn.GELU, "norm": nn.LayerNorm, "drop": dropout}
        super().__init__((Residual(width, inner, **kinds) for _ in range(4)), **ends, tied=True)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        table = nn.Parameter(torch.randn(64, width), requires_grad=not frozen)
        self.positions = Parts(lambda m, x: x + m.table[: x.shape[1]], table=table)
        self.to(dtype)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"ids": word_batch(0, 0)}

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.positions(self.first(ids)))
        return self.last(self.norm(hidden) * self.scale)


def wide_words() -> TiedWords:
    """Return a model of which methods for slow links encode uneven parts, and whole matrices."""
    return TiedWords(64, 67, frozen=False, dtype=torch.float32)


def word_batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(WORDS, (ROWS, LENGTH), generator=generator)


def word_loss(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, WORDS), ids.roll(-1, 1).reshape(-1))


def loss_by_hand(model: nn.Module, ids: Tensor) -> Tensor:
    return word_loss(model(ids), ids)


def word_fragment(name: str, fragments: int = 2) -> int:
    """Return the fragment of a parameter of ``TiedWords``."""
    first, _, rest = name.partition(".")
    if first == "blocks":
        return int(rest.partition(".")[0]) % fragments
    return 0 if first in ("first", "scale") else fragments - 1


def adamw(model: nn.Module) -> Optimizer:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def words_by_hand(workers: int, ranks: int, rounds: Rounds, **options: Any) -> ByHand:
    fragment_of = word_fragment if rounds.fragments > 1 else lambda name: 0
    words = {"build": TiedWords, "batch": word_batch, "loss": loss_by_hand}
    return ByHand(workers, ranks, rounds, adamw, fragment_of, **words, **options)


def emulate_hosts(monkeypatch: pytest.MonkeyPatch, per_host: int) -> None:
    """Let ranks believe in hosts: a host's name has torchrun's number of the host as a part."""
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // per_host))


class CellTraining:
    """A model under local steps, and its steps.

    Args:
        strategy: inside of a worker, or without ``rounds`` the strategy of the run.
        rounds: the knobs; None for the strategy by itself.
        links: methods between hosts.
        clip: the largest norm.
        model: by default ``TiedWords``.
        options: of the accelerator.
    """

    def __init__(
        self,
        strategy: Mapping[str, Any],
        rounds: Rounds | None,
        *,
        links: Mapping[str, Any] | None = None,
        clip: float | None = None,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        if rounds is not None:
            strategy = {"name": "local", "inner": strategy, **asdict(rounds)}
        config = {"strategy": strategy, "links": {"far": links or {}}}
        self.accelerator = Accelerator(config=config, cpu=True, **options)
        whole = model or TiedWords()
        self.model, self.optimizer = self.accelerator.prepare(whole, adamw(whole))
        self.clip = clip
        self._losses: list[Tensor] = []
        self.norms: list[float] = []
        self.place = self.accelerator.mesh["dp"].rank

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            with self.accelerator.accumulate(self.model):
                ids = word_batch(step, self.place)
                loss = self.accelerator.pipeline_step(self.model, ids, ids, loss_fn=word_loss)
                self._losses.append(loss)
                if self.clip is not None and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()

    @property
    def losses(self) -> list[float]:
        """The losses of all micro-batches: stages know them at the end of a window."""
        return [loss.item() for loss in self._losses]

    def outer(self) -> Mapping[str, Tensor]:
        return self.accelerator.get_state_dict(self.model)

    def own(self) -> dict[str, Tensor]:
        """Return the worker's own weights; of the stages of this rank."""
        with self.accelerator.gathered(self.model):
            return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def close(self) -> None:
        self.accelerator.free_memory()
