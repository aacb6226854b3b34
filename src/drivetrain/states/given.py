"""The groups of an optimizer as its script made them, before a strategy divides the parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

KERNELS = frozenset({"foreach", "fused"})
"""Options that choose a kernel: no saved state overrules the choice of the loading run."""


class GivenParameter:
    """A parameter of the script, which a rank of a pipeline forgets if it is another stage's.

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
        self._stand_in: nn.Parameter | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The script's own object; on ranks that have let go of it, one of its shape on meta."""
        found = self._reference() if self._stand_in is None else self._stand_in
        if found is None:
            shape, dtype, trainable = self._facts
            values = torch.empty(shape, dtype=dtype, device="meta")
            found = self._stand_in = nn.Parameter(values, requires_grad=trainable)
        return found


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
