"""The tensors that a forward meets: their numbers, by identity, and their facts."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.model.look import ReturnedLeaf, SeenTensor, TensorRef
from drivetrain.model.results import Facts, facts_of
from drivetrain.model.valueless import ValuelessTensor


class SeenTensors:
    """Numbers of tensors, in the order in which a forward meets them."""

    def __init__(self) -> None:
        # torch's mapping by identity has no types.
        by_identity: Any = WeakIdKeyDictionary
        self._numbers: MutableMapping[Tensor, int] = by_identity()
        self.tensors: list[SeenTensor] = []

    def equate(self, tensor: Tensor, number: int) -> None:
        """Let a tensor that stands for another one have its number."""
        self._numbers[tensor] = number

    def returned(self, leaf: Any, handed: Any, argument: int | None) -> ReturnedLeaf:
        """Return the record of a leaf of a block's result."""
        is_tensor = isinstance(leaf, Tensor)
        return ReturnedLeaf(
            self.number_of(leaf),
            self.number_of(handed),
            argument,
            None if is_tensor else leaf,
            is_tensor and leaf.requires_grad,
        )

    def number_of(self, leaf: Any) -> int | None:
        """Return the number of a tensor; None for another object."""
        return self.number(leaf) if isinstance(leaf, Tensor) else None

    def referring(self, value: Any) -> Any:
        """Return an argument with references in place of tensors."""
        if isinstance(value, Tensor):
            return TensorRef(self.number(value))
        if type(value) in (list, tuple):
            return type(value)(self.referring(item) for item in value)
        if type(value) is dict:
            return {key: self.referring(item) for key, item in value.items()}
        return value

    def number(self, tensor: Tensor, known: bool = True) -> int:
        """Return the number of a tensor; a new one gets the next, with values if they are known."""
        number = self._numbers.get(tensor)
        if number is None:
            number = self._numbers[tensor] = len(self.tensors)
            known = known and not isinstance(tensor, ValuelessTensor)
            with torch._C.DisableTorchFunction():
                seen = SeenTensor(_facts(tensor), tensor.requires_grad, known)
            self.tensors.append(seen)
        return number


def _facts(tensor: Tensor) -> Facts:
    """Return the facts of any tensor; no shape counts of ragged and sparse tensors."""
    if isinstance(tensor, ValuelessTensor):
        return tensor.facts
    if tensor.layout is not torch.strided or tensor.is_nested:
        return Facts((), (), tensor.dtype, tensor.device)
    return facts_of(tensor)
