"""The shard of a flat tensor: where the part that this rank owns lies between its uses."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drivetrain.errors import UsageError
from drivetrain.parts.guard import guard
from drivetrain.sharding.slot import ParameterSlot


class ShardHome(ABC):
    """The home of this rank's shard of one flat tensor, between the uses of its values.

    Args:
        numel: how many elements.
        dtype: their dtype: that of the optimizer's masters, until somebody else keeps those.
        own: where they belong among the values of the flat tensor: 1-D views, in order.

    Attributes:
        dtype: their dtype.
        numel: how many elements.
        tensor: 1-D, all of them, if they lie in memory as one range; otherwise None.
        separate: whether they are kept besides the values of the flat tensor.
        in_store: whether a store keeps them.
        at_hand: whether ``fill`` need not wait for anything.
    """

    separate: ClassVar[bool] = True
    in_store: ClassVar[bool] = False
    at_hand: ClassVar[bool] = True

    def __init__(self, numel: int, dtype: torch.dtype, own: Sequence[Tensor]) -> None:
        self.numel = numel
        self.dtype = dtype
        self.tensor: Tensor | None = None
        self._own = list(own)
        self._lengths = [part.numel() for part in own]

    @abstractmethod
    def fill(self) -> None:
        """Copy everything into its places among the values, which have memory now."""

    @abstractmethod
    def take(self) -> None:
        """Copy everything from its places back, where it changed.

        Elements that nobody changed keep the digits that the dtype of forward has no room for.
        """

    @abstractmethod
    def read(self, slot: ParameterSlot) -> Tensor:
        """Return the owned share of a parameter, 1-D, perhaps a view."""

    @abstractmethod
    def write(self, slot: ParameterSlot, values: Tensor) -> None:
        """Replace the owned share of a parameter by a 1-D tensor."""

    @abstractmethod
    def replace(self, values: Tensor) -> None:
        """Replace everything by a 1-D tensor of any floating dtype, on any device."""

    @abstractmethod
    def narrow(self, dtype: torch.dtype) -> None:
        """Go on in the dtype of forward: somebody else keeps the masters."""

    def flush(self) -> None:
        """Keep the first written values for good."""
        return

    def ahead(self) -> None:
        """Start to bring the values that ``fill`` will need soon."""
        return

    def place(self, slot: ParameterSlot) -> Tensor | None:
        """Return where an update can write a parameter's new values, 1-D; None: nowhere."""
        return None if self.tensor is None else self.tensor[slot.local]

    def _pieces(self, values: Tensor) -> list[Tensor]:
        return list(torch.split(values, self._lengths))

    def _taken_back(self, values: Tensor) -> None:
        for own, piece in zip(self._own, self._pieces(values), strict=True):
            piece.copy_(torch.where(piece.to(own.dtype) == own, piece, own))


class ShardInPlace(ShardHome):
    """A shard that lies among the values, which are never freed: nothing has to move."""

    separate: ClassVar[bool] = False

    def __init__(self, values: Tensor, own: Sequence[Tensor]) -> None:
        super().__init__(sum(part.numel() for part in own), values.dtype, own)
        self._values = values
        if len(own) <= 1:
            self.tensor = own[0] if own else values[:0]

    def fill(self) -> None:
        """Do nothing."""

    def take(self) -> None:
        """Do nothing."""

    def read(self, slot: ParameterSlot) -> Tensor:
        """Return a view of the values."""
        return self._values[slot.own]

    def write(self, slot: ParameterSlot, values: Tensor) -> None:
        """Write into the values."""
        self._values[slot.own].copy_(values)

    def replace(self, values: Tensor) -> None:
        """Write into the values."""
        for own, piece in zip(self._own, self._pieces(values), strict=True):
            own.copy_(piece)

    def narrow(self, dtype: torch.dtype) -> None:
        """Do nothing: this is the dtype of forward."""

    def place(self, slot: ParameterSlot) -> Tensor:
        """Return a view of the values."""
        return self._values[slot.own]


class ShardInMemory(ShardHome):
    """A shard that is kept a second time, or while the values are freed."""

    tensor: Tensor

    def __init__(
        self, numel: int, dtype: torch.dtype, own: Sequence[Tensor], device: torch.device
    ) -> None:
        super().__init__(numel, dtype, own)
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._parts = self._pieces(self.tensor)

    def fill(self) -> None:
        """Copy, with a cast where dtypes differ."""
        if self._own:
            with torch.no_grad():
                torch._foreach_copy_(self._own, self._parts)

    def take(self) -> None:
        """Copy the changed values back."""
        self._taken_back(self.tensor)

    def read(self, slot: ParameterSlot) -> Tensor:
        """Return a view."""
        return self.tensor[slot.local]

    def write(self, slot: ParameterSlot, values: Tensor) -> None:
        """Write into it."""
        self.tensor[slot.local].copy_(values)

    def replace(self, values: Tensor) -> None:
        """Write into it."""
        self.tensor.copy_(values)

    def narrow(self, dtype: torch.dtype) -> None:
        """Keep a narrower copy instead."""
        if dtype is not self.dtype:
            self.dtype = dtype
            self.tensor = self.tensor.to(dtype)
            self._parts = self._pieces(self.tensor)


# --- what optimizers hold in the place of a shard that a store keeps ---


class PlaceholderGuard:
    """The guard of a placeholder: a parameter without values in an optimizer's group.

    Args:
        name: of the parameter in whose place it stands.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"expected values, found what an offloaded optimizer holds in the place of "
            f"{self._name!r}: a store keeps them; read the parameter of the model, or take "
            "accelerator.get_state_dict(model)"
        )


def make_placeholder(slot: ParameterSlot, fragment: nn.Parameter, dtype: torch.dtype) -> None:
    """Take the values of a parameter's fragment away: schedulers and names go on working.

    Args:
        slot: the parameter.
        fragment: what the optimizer holds in its place.
        dtype: of the gradients that the fragment is to have.
    """
    empty = torch.empty_strided(slot.fragment_shape, slot.fragment_strides, dtype=dtype)
    empty.untyped_storage().resize_(0)
    grad, fragment.grad = fragment.grad, None
    with torch._C.DisableTorchFunctionSubclass():
        fragment.data = empty
    if grad is not None and grad.dtype is dtype:
        fragment.grad = grad
    guard(fragment, PlaceholderGuard(slot.name))
