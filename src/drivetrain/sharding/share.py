"""What a rank owns of a flat tensor between its uses: where that lies, and how it comes back.

In a store it is one tensor, like the one that would be in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from drivetrain.store import TensorStore

if TYPE_CHECKING:
    from drivetrain.sharding.slot import Slot


class Share(ABC):
    """What this rank owns of one flat tensor.

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
    """

    separate: ClassVar[bool] = True
    in_store: ClassVar[bool] = False

    def __init__(self, numel: int, dtype: torch.dtype, own: Sequence[Tensor]) -> None:
        self.numel = numel
        self.dtype = dtype
        self.tensor: Tensor | None = None
        self._own = list(own)
        self._lengths = [part.numel() for part in own]

    @property
    def at_hand(self) -> bool:
        """Whether ``fill`` need not wait for anything."""
        return True

    @abstractmethod
    def fill(self) -> None:
        """Copy everything into its places among the values, which have memory now."""

    @abstractmethod
    def take(self) -> None:
        """Copy everything from its places back, where it changed.

        What nobody changed keeps the digits that the dtype of forward has no room for.
        """

    @abstractmethod
    def read(self, slot: "Slot") -> Tensor:
        """Return what is owned of a parameter, 1-D; it may be a view."""

    @abstractmethod
    def write(self, slot: "Slot", values: Tensor) -> None:
        """Replace what is owned of a parameter by a 1-D tensor."""

    @abstractmethod
    def replace(self, values: Tensor) -> None:
        """Replace everything by a 1-D tensor of any floating dtype, on any device."""

    @abstractmethod
    def narrow(self, dtype: torch.dtype) -> None:
        """Go on in the dtype of forward: somebody else keeps the masters."""

    def settle(self) -> None:
        """Keep what was written first for good."""
        return

    def ahead(self) -> None:
        """Start to bring what ``fill`` will need soon."""
        return

    def place(self, slot: "Slot") -> Tensor | None:
        """Return where an update can write a parameter's new values, 1-D; None: nowhere."""
        return None if self.tensor is None else self.tensor[slot.local]

    def _pieces(self, values: Tensor) -> list[Tensor]:
        return list(torch.split(values, self._lengths))

    def _taken_back(self, values: Tensor) -> None:
        for own, piece in zip(self._own, self._pieces(values), strict=True):
            piece.copy_(torch.where(piece.to(own.dtype) == own, piece, own))


class ShareInPlace(Share):
    """It lies among the values, which are never freed: nothing has to move."""

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

    def read(self, slot: "Slot") -> Tensor:
        """Return a view of the values."""
        return self._values[slot.own]

    def write(self, slot: "Slot", values: Tensor) -> None:
        """Write into the values."""
        self._values[slot.own].copy_(values)

    def replace(self, values: Tensor) -> None:
        """Write into the values."""
        for own, piece in zip(self._own, self._pieces(values), strict=True):
            own.copy_(piece)

    def narrow(self, dtype: torch.dtype) -> None:
        """Do nothing: this is the dtype of forward."""

    def place(self, slot: "Slot") -> Tensor:
        """Return a view of the values."""
        return self._values[slot.own]


class ShareInMemory(Share):
    """It is kept a second time, or while the values are freed."""

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
        """Copy back what changed."""
        self._taken_back(self.tensor)

    def read(self, slot: "Slot") -> Tensor:
        """Return a view."""
        return self.tensor[slot.local]

    def write(self, slot: "Slot", values: Tensor) -> None:
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


class ShareInStore(Share):
    """It lies in a store and comes for every use.

    Args:
        numel: how many elements.
        dtype: their dtype.
        own: where they belong among the values.
        store: the store.
        key: its name there.
    """

    in_store: ClassVar[bool] = True

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        own: Sequence[Tensor],
        store: TensorStore,
        key: str,
    ) -> None:
        super().__init__(numel, dtype, own)
        self._store = store
        self._key = key
        self._fresh: Tensor | None = torch.empty(numel, dtype=dtype)  # until it is full

    def fill(self) -> None:
        """Bring it, and copy it."""
        if self._own:
            with torch.no_grad():
                torch._foreach_copy_(self._own, self._pieces(self._fetch()))

    def take(self) -> None:
        """Put back what changed."""
        values = self._fetch().clone()
        self._taken_back(values)
        self.replace(values)

    def read(self, slot: "Slot") -> Tensor:
        """Bring all of it, and return a copy of a part, which does not hold the rest."""
        return self._fetch()[slot.local].clone()

    def write(self, slot: "Slot", values: Tensor) -> None:
        """Bring it, change it and put it back; at first, wait until it was written for good."""
        if self._fresh is not None:
            self._fresh[slot.local].copy_(values)
            return
        whole = self._fetch().clone()
        whole[slot.local].copy_(values)
        self.replace(whole)

    def replace(self, values: Tensor) -> None:
        """Put it."""
        self._fresh = None
        self._store.put(self._key, values.to(self.dtype))

    def settle(self) -> None:
        """Put what was written first; from here on nothing of it stays in memory."""
        if self._fresh is not None:
            self.replace(self._fresh)

    def narrow(self, dtype: torch.dtype) -> None:
        """Put a narrower copy in its place."""
        if dtype is not self.dtype:
            values = self._fetch()
            self.dtype = dtype
            self.replace(values)

    @property
    def at_hand(self) -> bool:
        """Return False: it comes from the store."""
        return False

    def ahead(self) -> None:
        """Let the store read ahead."""
        if self._fresh is None:
            self._store.prefetch([self._key])

    def _fetch(self) -> Tensor:
        return self._store.fetch(self._key) if self._fresh is None else self._fresh
