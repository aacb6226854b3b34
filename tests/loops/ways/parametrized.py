"""Computed weights: scripts prune, normalize and parametrize layers of a prepared model."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from way_kit import Loop, after


class Symmetric(nn.Module):
    """The sum of a matrix and its transposition, times a factor that may be trained."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5)) if trained else 0.5

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.flip(0)) * self.factor


@after
def a_layer_is_pruned(loop: Loop, step: int, model: nn.Module) -> None:
    if step == 0:
        prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.4)


@after
def a_layer_is_pruned_for_good(loop: Loop, step: int, model: nn.Module) -> None:
    if step == 0:
        prune.ln_structured(model.blocks[0].up, "weight", amount=0.25, n=2, dim=0)
    if step == 1:
        prune.remove(model.blocks[0].up, "weight")


@after
def a_head_is_pruned(loop: Loop, step: int, model: nn.Module) -> None:
    if step == 0:
        prune.l1_unstructured(model.last, "weight", amount=0.4)


@after
def a_weight_is_computed_from_another(loop: Loop, step: int, model: nn.Module) -> None:
    if step == 0:
        parametrize.register_parametrization(model.blocks[0].up, "weight", Symmetric(trained=False))


@after
def a_weight_is_divided_by_its_spectral_norm(loop: Loop, step: int, model: nn.Module) -> None:
    if step == 0:
        torch.manual_seed(3)
        parametrizations.spectral_norm(model.blocks[0].up)


@after
def a_weight_gets_a_length_of_its_own(loop: Loop, step: int, model: nn.Module) -> None:
    if step == 0:
        parametrizations.weight_norm(model.blocks[0].up)


@after
def a_weight_is_computed_with_a_trained_factor(loop: Loop, step: int, model: nn.Module) -> None:
    if step == 0:
        parametrize.register_parametrization(model.blocks[0].up, "weight", Symmetric(trained=True))
