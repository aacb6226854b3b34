"""The groups of an optimizer as its script made them, before a strategy divides the parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

KERNELS = frozenset({"foreach", "fused"})
"""Options that choose a kernel: no saved state overrules the choice of the loading run."""


class GivenParameter:
    """A parameter of the script, which a rank of a pipeline lets go of if it is another stage's.

    Args:
        parameter: whole.

    Attributes:
        key: its identity.
        nbytes: size of the whole parameter.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.key = id(parameter)
        self.nbytes = parameter.nbytes
        self._reference = ref(parameter)
        self._facts = parameter.shape, parameter.dtype, parameter.requires_grad

    def is_same(self, tensor: Tensor) -> bool:
        """Whether a tensor is the script's own object, or the one in its place."""
        return tensor is self._reference() or tensor is self.__dict__.get("stand_in")

    @property
    def parameter(self) -> nn.Parameter:
        """The script's own object."""
        found = self._reference()
        return self.stand_in if found is None else found

    @cached_property
    def stand_in(self) -> nn.Parameter:
        """A parameter of the same shape without values, for ranks that have none."""
        shape, dtype, trainable = self._facts
        values = torch.empty(shape, dtype=dtype, device="meta")
        return nn.Parameter(values, requires_grad=trainable)


@dataclass(frozen=True, slots=True)
class GivenGroup:
    """One group.

    Attributes:
        parameters: in the script's order.
        kernels: the script's options that choose a kernel.
    """

    parameters: Sequence[GivenParameter]
    kernels: Mapping[str, Any]

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "GivenGroup":
        """Describe a group whose parameters are whole."""
        kernels = {key: group[key] for key in KERNELS & group.keys()}
        return cls([GivenParameter(each) for each in group["params"]], kernels)


class GivenGroups:
    """All groups of one optimizer, with those that are added later.

    Args:
        optimizer: no strategy has divided its parameters yet.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._known: list[GivenGroup] = []
        self.of(optimizer)

    def of(self, optimizer: Optimizer) -> list[GivenGroup]:
        """Return the groups of the optimizer: of new ones, parameters are whole until a step."""
        new = optimizer.param_groups[len(self._known) :]
        self._known += [GivenGroup.of(group) for group in new]
        return self._known
