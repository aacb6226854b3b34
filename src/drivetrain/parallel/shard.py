"""A flat tensor of a unit, and its shard: where the part that this rank owns lies between uses."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from drivetrain.errors import UsageError
from drivetrain.model.deferred import become
from drivetrain.model.guard import RefusingGuard, check_ordinary, guard
from drivetrain.parallel.layout import FlatLayout, ParameterSlot


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

    @property
    def untouched(self) -> bool:
        """Whether it is besides the values, and was the same when it was last written."""
        return False

    @abstractmethod
    def fill(self, places: Sequence[Tensor] | None = None) -> None:
        """Copy everything into its places among the values, which have memory now.

        Args:
            places: others of the same lengths, perhaps of another dtype, that are filled instead.
        """

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

    @torch.no_grad()
    def _taken_back(self, values: Tensor) -> None:
        for own, piece in zip(self._own, self._pieces(values), strict=True):
            # A device would have to be waited for; and on the CPU most passes end here.
            if not own.is_cpu or not torch.equal(piece.to(own.dtype), own):
                piece.copy_(followed(piece, own))


def followed(master: Tensor, own: Tensor) -> Tensor:
    """Return a master with the values of forward where these are not its own, rounded.

    Elements that nobody changed keep the digits that the dtype of forward has no room for.
    """
    return torch.where(master.to(own.dtype) == own, master, own.to(master.dtype))


class ShardInPlace(ShardHome):
    """A shard that lies among the values, which are never freed: nothing has to move."""

    separate: ClassVar[bool] = False

    def __init__(self, values: Tensor, own: Sequence[Tensor]) -> None:
        super().__init__(sum(part.numel() for part in own), values.dtype, own)
        self._values = values
        if len(own) <= 1:
            self.tensor = own[0] if own else values[:0]

    def fill(self, places: Sequence[Tensor] | None = None) -> None:
        """Copy into other places; among the values everything lies already."""
        if places:
            with torch.no_grad():
                torch._foreach_copy_(list(places), self._own)

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
        self._version = -1  # of the tensor when the values were the same; it is also fragments'

    def fill(self, places: Sequence[Tensor] | None = None) -> None:
        """Copy, with a cast where dtypes differ."""
        if self._own:
            with torch.no_grad():
                torch._foreach_copy_(self._own if places is None else list(places), self._parts)
        if places is None:
            self._version = self.tensor._version

    def flush(self) -> None:
        """Remember that shard and values are the same."""
        self._version = self.tensor._version

    def take(self) -> None:
        """Copy the changed values back."""
        self._taken_back(self.tensor)
        self.flush()

    @property
    def untouched(self) -> bool:
        """Whether it was the same as the values when it was last written."""
        return self._version == self.tensor._version

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
    refusal = RefusingGuard(
        lambda *_: UsageError(
            f"expected values, found what an offloaded optimizer holds in the place of "
            f"{slot.name!r}: a store keeps them; read the parameter of the model, or take "
            "accelerator.get_state_dict(model)"
        )
    )
    guard(fragment, refusal)


WholeValues = Callable[[str, nn.Parameter], Tensor]
"""Gives the whole values of a parameter; called once for each, in order."""


class FlatTensor:
    """The parameters of one kind in a unit, side by side in one tensor; and this rank's shard.

    Args:
        layout: which parameters it holds.
        sharded: whether its values are freed between uses.
        apart: whether this rank's shard is kept a second time though values are not freed.
        parameters: parameters by name.
        rank: this rank among those that share the unit.
        device: where it lives.

    Attributes:
        layout: which parameters it holds.
        sharded: whether its values are freed between uses.
        apart: whether gathered values are approximate, so that the shard never lies among them.
        values: 1-D, all parameters in the dtype that forward reads; without memory while freed.
        shard: what this rank owns, in the dtype that the optimizer updates.
        owned: how many elements that are.
        pieces: for each rank, what it owns as ranges of the flat tensor.
        parts: for each rank, what it owns of the values, as views.
        own: those of this rank.
        slots: its parameters, in order.
        fragments: what optimizers hold in the places of parameters.
        masters_left: whether a store keeps the masters of all its parameters.
        trained: whether one of its parameters has ever required a gradient, or has state of an
            optimizer out of a checkpoint; alike on all ranks.
        gradient_device: where the gradients of this rank's shard are kept.
    """

    shard: ShardHome

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        device: torch.device,
        *,
        sharded: bool,
        apart: bool = False,
    ) -> None:
        self.layout = layout
        self.sharded = sharded
        self.apart = apart
        self.values = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.slots: list[ParameterSlot] = []
        first = 0
        for place in layout.places:
            parameter = parameters[place.name]
            check_ordinary(place.name, parameter)
            slot = ParameterSlot.of(place, parameter, layout, rank, first)
            self.slots.append(slot)
            first += slot.owned_numel
        self.owned = first
        self.pieces = [layout.pieces(one) for one in range(len(layout.places[0].shares))]
        self.parts = [[self.values[start:stop] for start, stop in each] for each in self.pieces]
        self.own = self.parts[rank]
        self.fragments: dict[ParameterSlot, nn.Parameter] = {}
        self.masters_left = False
        self.trained = False
        self.gradient_device = device

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates another dtype than forward reads."""
        return self.layout.master is not self.layout.dtype

    @property
    def moves(self) -> bool:
        """Whether an optimizer may have changed the parameters: not if all were always frozen."""
        return self.layout.trainable or self.trained

    def adopt(self, values: WholeValues) -> None:
        """Copy the parameters' whole values in, and make the parameters views of the flat tensor.

        Args:
            values: gives them.
        """
        for slot in self.slots:
            given = values(slot.name, slot.parameter)
            view = slot.view(self.values)
            if not self.sharded:
                view.copy_(given)
            if slot.owned_numel and self.shard.separate:
                self.shard.write(slot, slot.in_memory_order(given)[slice(*slot.owned)])
            if slot.parameter.is_meta:
                become(slot.parameter, view.data, slot.name)  # .data: a count of its versions
            else:
                slot.parameter.data = view  # the object and all that hold it stay
        self.shard.flush()

    def take_data(self, slot: ParameterSlot) -> None:
        """Copy in the ``data`` that the script set on a parameter, which is a view again then."""
        data, view = slot.parameter.data, slot.view(self.values)
        if data.shape != view.shape or data.dtype is not view.dtype:
            raise UsageError(
                f"expected data of shape {tuple(view.shape)} and {view.dtype} for {slot.name!r}, "
                f"found {tuple(data.shape)} and {data.dtype}, set by 'parameter.data = ...'; "
                "change shapes and dtypes before prepare()"
            )
        view.copy_(data)
        slot.parameter.data = view

    def leave_masters(self) -> None:
        """Keep only the values that forward reads: a store keeps all masters."""
        self.masters_left = True
        if self.sharded or self.apart:
            self.shard.narrow(self.layout.dtype)
        else:
            self.shard = ShardInPlace(self.values, self.own)

    def fragment(self, slot: ParameterSlot) -> nn.Parameter | None:
        """Return the fragment that an optimizer holds for a parameter; None without a share."""
        found = self.fragments.get(slot)
        if found is not None or not slot.owned_numel:
            return found
        memory = self.shard.tensor
        if memory is None:  # a store will keep the master
            fragment = nn.Parameter(torch.empty(0, dtype=self.layout.master))
            make_placeholder(slot, fragment, self.layout.master)
        else:
            fragment = nn.Parameter(slot.piece(memory))
        fragment.requires_grad_(slot.parameter.requires_grad)
        self.fragments[slot] = fragment
        return fragment

    def with_gradients(self) -> dict[ParameterSlot, Tensor]:
        """Return the gradients of this rank's fragments, in order, without None."""
        found = {}
        for slot in self.slots:
            fragment = self.fragments.get(slot)
            if fragment is not None and fragment.grad is not None:
                found[slot] = fragment.grad
        return found
