"""Linear layers that are divided by themselves: whole activations come in and go out.

Cut by columns, a layer gathers its output features; cut by rows, it takes its rank's features of
the input. No other layer has to fit (Shoeybi et al. 2019, arXiv 1909.08053, section 3, divides
pairs, between which nothing is sent; here each layer sends twice).
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from drivetrain_megatron.tensor.linear import attach_column, attach_row
from drivetrain_megatron.tensor.operators import Edges, gather, scatter
from drivetrain_megatron.tensor.partition import Partition


@dataclass(frozen=True, slots=True)
class FeatureGate:
    """Hooks between the whole features of an activation and this rank's.

    Attributes:
        edges: the ranks.
        features: how the last dim is cut.
    """

    edges: Edges
    features: Partition

    def scattered(self, module: nn.Module, args: Any) -> Any:
        """Be a forward pre-hook: the layer sees this rank's input features."""
        x, *rest = args
        return (scatter(x, self.edges.ranks, self.features), *rest)

    def gathered(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Be a forward hook: the code after the layer sees all output features."""
        return gather(output, self.edges.ranks, self.features)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FeatureGate":
        return self  # communicators have threads and groups


def attach_alone(module: nn.Module, edges: Edges, features: Partition, *, by_rows: bool) -> None:
    """Let a linear layer with this rank's share of the weight compute as the whole layer.

    Raises:
        ConfigError: the module is no linear layer, or one with a forward of its own.
    """
    gate = FeatureGate(edges, replace(features, dim=-1))
    if by_rows:
        attach_row(module, edges, gate.features)
        module.register_forward_pre_hook(gate.scattered)
    else:
        attach_column(module, edges, gate.features)
        module.register_forward_hook(gate.gathered, prepend=True)  # users' hooks see the whole
