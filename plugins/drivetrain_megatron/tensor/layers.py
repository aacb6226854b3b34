"""Which modules are linear layers: torch's own, and the transposed one of GPT-2."""

from typing import Any

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies its input's last dim by a matrix, plus perhaps a bias."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as (inputs, outputs), as ``Conv1D`` of GPT-2 does."""
    weight = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, nn.Parameter)
        and isinstance(bias, nn.Parameter)
        and weight.dim() == 2
        and bias.shape == weight.shape[1:]
        and not isinstance(module, nn.modules.conv._ConvNd)
    )


def features_of(module: nn.Module) -> tuple[int, int]:
    """Return how many features go into a linear layer and come out of it."""
    weight: Any = module.weight
    outputs, inputs = weight.shape
    return (int(outputs), int(inputs)) if is_transposed(module) else (int(inputs), int(outputs))


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` has wrapped, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module
