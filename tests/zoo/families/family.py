"""A family of models: how a tiny one is built, its batches, and the loss of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.verify import without_dropout

ROWS = 4
"""Of every batch."""

Batch = dict[str, Any]
Models = tuple[nn.Module, ...]
SEED = 3


class Phase(NamedTuple):
    """A part of a training step: which model it trains, and the loss of all models on a batch."""

    trained: int
    loss: Callable[[Models, Batch], Tensor]


def own_loss(models: Models, batch: Batch) -> Tensor:
    """Return the loss that the model computes itself."""
    (model,) = models
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True, kw_only=True)
class Family:
    """Tiny models of one family.

    Attributes:
        kind: the heading under which the table lists it.
        make: builds the models, with any random weights.
        batch: the batch of a seed; equal seeds give equal batches.
        phases: the parts of a step, each with a backward and an optimizer step of its own.
        dim: of the tensors of a batch, along which its rows lie.
    """

    kind: str
    make: Callable[[], Models]
    batch: Callable[[int], Batch]
    phases: tuple[Phase, ...] = (Phase(0, own_loss),)
    dim: int = 0

    def build(self) -> Models:
        """Return the models in fp64, in training mode, with the same weights on every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            models = self.make()
        for model in models:
            without_dropout(model.double().train())
        return models


def plain(
    kind: str,
    make: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    dim: int = 0,
) -> Family:
    """Return a family of one model, whose loss the script computes or the model itself."""
    if loss is None:
        return Family(kind=kind, make=lambda: (make(),), batch=batch, dim=dim)
    return Family(
        kind=kind,
        make=lambda: (make(),),
        batch=batch,
        phases=(Phase(0, lambda models, given: loss(models[0], given)),),
        dim=dim,
    )


def transformers_model(name: str, **options: Any) -> nn.Module:
    """Return a model of ``transformers`` from a configuration without random draws."""
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**options)
    _draw_nothing(config)
    return kind(config)


def hf(kind: str, name: str, batch: Callable[[int], Batch], **options: Any) -> Family:
    """Return a family of ``transformers``; ``options`` are those of its configuration."""
    return plain(kind, lambda: transformers_model(name, **options), batch)


def _draw_nothing(config: Any) -> None:
    """Set every probability of dropping or masking to 0, in the parts of a configuration too."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _draw_nothing(value)
        elif isinstance(value, float) and (
            "drop" in key or "jitter" in key or key.startswith("mask_")
        ):
            setattr(config, key, 0.0)
        elif key == "apply_spec_augment":
            setattr(config, key, False)


def generator(seed: int) -> torch.Generator:
    """Return a generator of its own for a batch."""
    return torch.Generator().manual_seed(1000 + seed)


def numbers(seed: int, *shape: int) -> Tensor:
    """Return normal numbers of shape (ROWS, \\*shape), fp64."""
    return torch.randn(ROWS, *shape, generator=generator(seed), dtype=torch.float64)


def integers(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """Return integers of shape (ROWS, \\*shape) in [low, high)."""
    return torch.randint(low, high, (ROWS, *shape), generator=generator(seed))
