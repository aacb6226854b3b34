"""The ends of a region of weights in no layer (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

Each rank computes with a share of the inner features, and with all of the inputs: the gradients of
all inputs are summed, also those of the weights with which a router mixes experts. The results are
parts of a sum. A bias that is added before the sum has its share of features on each rank, and
zeros elsewhere.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from drivetrain.collectives import Communicator
from drivetrain_megatron.tensor.behavior import computing
from drivetrain_megatron.tensor.operators import copy, reduce
from drivetrain_megatron.tensor.partition import Partition


class RegionEntrance:
    """A forward pre-hook: everything that wants a gradient enters all ranks."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments that the module sees."""
        return tree_map(self._enter, (args, kwargs))

    def _enter(self, x: Any) -> Any:
        return copy(x, self._ranks) if isinstance(x, Tensor) and x.requires_grad else x

    def __deepcopy__(self, memo: dict[int, Any]) -> "RegionEntrance":
        return self  # communicators have threads and groups


class RegionExit:
    """A forward hook: the first tensor of a module's result is summed over ranks."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the result that the code after the module sees."""
        if isinstance(output, Tensor):
            return reduce(output, self._ranks)
        first, *rest = output
        return type(output)((reduce(first, self._ranks), *rest))

    def __deepcopy__(self, memo: dict[int, Any]) -> "RegionExit":
        return self


class PaddedBias:
    """Two hooks: while a module runs, its code finds a bias of full size."""

    def __init__(self, name: str, partition: Partition, rank: int) -> None:
        self._name = name
        start, stop = next(iter(partition.ranges[rank]), (0, 0))
        self._before, self._after = start, partition.size - stop

    def begin(self, module: nn.Module, args: Any) -> None:
        """Be a forward pre-hook."""
        with computing:  # before the module's own forward
            share = getattr(module, self._name)
            module.__dict__[self._name] = F.pad(share, (self._before, self._after))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook, also after an error."""
        module.__dict__.pop(self._name, None)


def attach_region(entrance: nn.Module, leaving: nn.Module, ranks: Communicator) -> None:
    """Let inputs of the one module enter all ranks, and results of the other be summed."""
    entrance.register_forward_pre_hook(RegionEntrance(ranks), with_kwargs=True)
    leaving.register_forward_hook(RegionExit(ranks))


def attach_bias(module: nn.Module, name: str, partition: Partition, rank: int) -> None:
    """Let a module that adds a bias before the sum find the bias with zeros for other ranks."""
    bias = PaddedBias(name, partition, rank)
    module.register_forward_pre_hook(bias.begin)
    module.register_forward_hook(bias.end, always_call=True)
