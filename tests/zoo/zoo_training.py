"""The training of a family: under a strategy on ranks, and the same in one process.

Three optimizer steps of two micro-batches each, two param groups, gradients clipped, and before the
last step an evaluation on every rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator
from drivetrain.model.modules import repeated_blocks
from drivetrain.verify import Doubles, RunRecord, StepRecord
from families import Batch, Family, Models, Phase
from families.family import ROWS

STEPS, WINDOW, MAX_NORM = 3, 2, 0.5
EVALUATION = 7777
"""The seed of the batch that every rank evaluates."""


def batch_of(family: Family, step: int, micro: int, part: int) -> Batch:
    """Return the micro-batch of a data-parallel rank."""
    return family.batch(100 * step + 10 * micro + part)


class Rows(Dataset[Batch]):
    """The rows of all micro-batches of a training, in the order in which they are read.

    One more step follows: the last batch of a loader ends a window, also in the middle of a phase.
    """

    def __init__(self, family: Family, parts: int) -> None:
        self.family, self.parts = family, parts

    def __len__(self) -> int:
        return (STEPS + 1) * WINDOW * self.parts * ROWS

    def __getitem__(self, index: int) -> Batch:
        place, row = divmod(index, ROWS)
        place, part = divmod(place, self.parts)
        batch = batch_of(self.family, *divmod(place, WINDOW), part)
        return {
            key: value.select(self.family.dim, row) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }

    def collated(self, rows: Sequence[Batch]) -> Batch:
        """Return rows as a batch, shaped as the family has them."""
        return {
            key: torch.stack([row[key] for row in rows], self.family.dim)
            if isinstance(value, Tensor)
            else value
            for key, value in rows[0].items()
        }


def loader_of(family: Family, parts: int) -> DataLoader[Batch]:
    """Return the loader of a script, for all data-parallel ranks together."""
    rows = Rows(family, parts)
    return DataLoader(rows, ROWS, collate_fn=rows.collated)


def optimizer_of(model: nn.Module) -> Optimizer:
    """Return AdamW with two groups: matrices decay, and all else learns more slowly."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.005},
    ]
    return AdamW([group for group in groups if group["params"]], lr=0.01, eps=1e-6)


def on_ranks(family: Family, strategy: Mapping[str, Any], divided: list[float]) -> RunRecord:
    """Train under a strategy, on every rank alike.

    Args:
        family: the models.
        strategy: name and options.
        divided: gets for each model the share of its blocks' bytes that no rank holds whole.
    """
    with Doubles():
        models = family.build()
        accelerator = Accelerator(
            strategy=dict(strategy), cpu=True, gradient_accumulation_steps=WINDOW
        )
        try:
            sizes = [_sizes(model) for model in models]
            loader = loader_of(family, accelerator.mesh["dp"].size)
            *prepared, loader = accelerator.prepare(*models, *map(optimizer_of, models), loader)
            models, optimizers = tuple(prepared[: len(models)]), prepared[len(models) :]
            divided += [_share(whole, _sizes(m)) for whole, m in zip(sizes, models, strict=True)]
            training = _Ranks(family, accelerator, models, optimizers, loader)
            training.run()
        finally:
            accelerator.free_memory()
        return training.record


class _Ranks:
    """A training under an Accelerator."""

    def __init__(
        self,
        family: Family,
        accelerator: Accelerator,
        models: Models,
        optimizers: Sequence[Optimizer],
        loader: Iterable[Batch],
    ) -> None:
        self.family, self.accelerator = family, accelerator
        self.models, self.optimizers = models, optimizers
        self.loader = loader
        self.record = RunRecord(models=len(models))

    def run(self) -> None:
        """Take all steps, and evaluate before the last one."""
        self.record.states.append(self._state())
        batches = iter(self.loader)
        for step in range(STEPS):
            notes = evaluated(self.family, self.models) if step == STEPS - 1 else {}
            losses: list[float] = []
            norms: list[float] = []
            given = [next(batches) for _ in range(WINDOW)]
            for phase in self.family.phases:
                window, norm = self._window(given, phase)
                means = self.accelerator.reduce(torch.stack(window).double(), "mean")
                losses += means.tolist()
                norms.append(norm)
            self.record.steps.append(step_record(losses, norms, notes))
            self.record.states.append(self._state())

    def _window(self, batches: Sequence[Batch], phase: Phase) -> tuple[list[Tensor], float]:
        """Return the losses of a phase's micro-batches, and the norm of its gradients."""
        losses, norm = [], None
        for batch in batches:
            with self.accelerator.accumulate(*self.models):
                loss = phase.loss(self.models, batch)
                self.accelerator.backward(loss)
                trained = self.models[phase.trained]
                norm = self.accelerator.clip_grad_norm_(trained.parameters(), MAX_NORM)
                self.optimizers[phase.trained].step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
            losses.append(loss)  # under a pipeline it has its value at the end of the window
        assert norm is not None
        return [loss.detach() for loss in losses], float(norm)

    def _state(self) -> dict[str, Tensor]:
        return joined_state(map(self.accelerator.get_state_dict, self.models))


def step_record(
    losses: Sequence[float], norms: Sequence[float], notes: Mapping[str, float]
) -> StepRecord:
    """Return the numbers of a step: losses of micro-batches, a norm for each phase, and notes."""
    named = {f"of phase {phase}": norm for phase, norm in enumerate(norms)}
    return StepRecord(losses=(tuple(losses),), norms=named, notes=dict(notes))


def joined_state(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of the tensors of several models."""
    return {
        f"{key} of model {index}": tensor.detach().clone()
        for index, state in enumerate(states)
        for key, tensor in state.items()
    }


def evaluated(family: Family, models: Models) -> dict[str, float]:
    """Return the loss of each phase in evaluation mode, and put training mode back."""
    for model in models:
        model.eval()
    with torch.no_grad():
        batch = family.batch(EVALUATION)
        losses = {
            f"evaluation {index}": float(phase.loss(models, batch))
            for index, phase in enumerate(family.phases)
        }
    for model in models:
        model.train()
    return losses


def _sizes(model: nn.Module) -> dict[str, int]:
    """Return the elements of each parameter of the repeated blocks, of all if nothing repeats."""
    blocks = [block for _, block in repeated_blocks(model)] or [model]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    named = model.named_parameters()
    return {name: parameter.numel() for name, parameter in named if id(parameter) in inside}


def _share(whole: Mapping[str, int], held: Mapping[str, int]) -> float:
    """Return which share of the elements belongs to parameters that the rank holds in part."""
    divided = sum(size for name, size in whole.items() if held.get(name, size) < size)
    return round(divided / sum(whole.values()), 3)


def in_one_process(family: Family, parts: int) -> RunRecord:
    """Train with the batches of all data-parallel ranks; the loss is the mean over them."""
    with Doubles():
        models = family.build()
        optimizers = [optimizer_of(model) for model in models]
        record = RunRecord(models=len(models), states=[_whole_state(models)])
        buffers = [[b.clone() for b in _buffers(models)] for _ in range(parts)]
        for step in range(STEPS):
            notes = evaluated(family, models) if step == STEPS - 1 else {}
            losses, norms = [], []
            for phase in family.phases:
                for micro in range(WINDOW):
                    batches = [batch_of(family, step, micro, part) for part in range(parts)]
                    losses.append(_mean_loss(phase, models, batches, buffers))
                # Every rank goes on with the buffers of the first.
                buffers = [list(buffers[0]) for _ in range(parts)]
                _write(models, buffers[0])
                trained = models[phase.trained].parameters()
                norms.append(float(nn.utils.clip_grad_norm_(trained, MAX_NORM)))
                optimizers[phase.trained].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            record.steps.append(step_record(losses, norms, notes))
            record.states.append(_whole_state(models))
        return record


def _mean_loss(
    phase: Phase, models: Models, batches: Sequence[Batch], buffers: list[list[Tensor]]
) -> float:
    """Run forward and backward of the mean over ranks, each of which has buffers of its own."""
    total = 0.0
    for batch, own in zip(batches, buffers, strict=True):
        _write(models, own)
        loss = phase.loss(models, batch)
        (loss / len(batches) / WINDOW).backward()
        own[:] = [buffer.clone() for buffer in _buffers(models)]
        total += float(loss.detach()) / len(batches)
    return total


def _whole_state(models: Models) -> dict[str, Tensor]:
    return joined_state(getattr(model, "_orig_mod", model).state_dict() for model in models)


def _buffers(models: Models) -> list[Tensor]:
    return [buffer for model in models for buffer in model.buffers()]


def _write(models: Models, values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(_buffers(models), values, strict=True):
            buffer.copy_(value)
