"""The geometry of one parameter in its flat tensor: its place, and this rank's share."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drivetrain.sharding.layout import FlatLayout, ParameterPlace, row_length
from drivetrain.shards import is_dense


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ParameterSlot:
    """One parameter in its flat tensor. Nothing of it changes while the model trains.

    Attributes:
        name: the parameter's name.
        parameter: the user's own object.
        shape: the parameter's shape.
        outer_dim: the dim that is outermost in memory.
        strides: its strides; the flat tensor holds it in this order.
        contiguous: whether the order of memory is that of the flattened parameter.
        numel: its elements.
        master: the dtype that the optimizer updates.
        divided: whether ranks own parts of it; otherwise one of them owns it whole.
        span: where it lies in the flat tensor.
        owned: the (start, stop) of the parameter, in the order of its memory, that this rank owns.
        owned_numel: elements that this rank owns.
        own: where the owned range lies in the flat tensor.
        local: where the owned range lies in this rank's shard of the flat tensor.
        fragment_shape: shape of what the optimizer holds: 1-D, rows, or the parameter's own.
        fragment_strides: its strides.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    outer_dim: int
    strides: tuple[int, ...]
    contiguous: bool
    numel: int
    master: torch.dtype
    divided: bool
    span: slice
    owned: tuple[int, int]
    owned_numel: int
    own: slice
    local: slice
    fragment_shape: tuple[int, ...]
    fragment_strides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        place: ParameterPlace,
        parameter: nn.Parameter,
        flat: FlatLayout,
        rank: int,
        first: int,
    ) -> "ParameterSlot":
        """Return the slot of a parameter.

        Args:
            place: where it lies in its flat tensor.
            parameter: the user's own object.
            flat: the layout of the flat tensor.
            rank: this rank among those that share the unit.
            first: where the owned range begins in the rank's shard.
        """
        plain = _plain(place.shape)
        strides = parameter.stride() if is_dense(parameter) else plain
        owned = place.shares[rank]
        numel = owned[1] - owned[0]
        shape, inner = _fragment_geometry(place, strides, flat, numel)
        return cls(
            name=place.name,
            parameter=parameter,
            shape=place.shape,
            outer_dim=place.outer_dim,
            strides=strides,
            contiguous=all(
                mine == usual or size == 1
                for mine, usual, size in zip(strides, plain, place.shape, strict=True)
            ),
            numel=place.numel,
            master=flat.master,
            divided=flat.cut != "whole",
            span=slice(place.offset, place.offset + place.numel),
            owned=owned,
            owned_numel=numel,
            own=slice(place.offset + owned[0], place.offset + owned[1]),
            local=slice(first, first + numel),
            fragment_shape=shape,
            fragment_strides=inner,
        )

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's place in a flat tensor, in the parameter's shape."""
        start = flat.storage_offset() + self.span.start
        return flat.as_strided(self.shape, self.strides, start)

    def piece(self, shard: Tensor) -> Tensor:
        """Return the owned range's place in a tensor like the rank's shard, in fragment shape."""
        start = shard.storage_offset() + self.local.start
        return shard.as_strided(self.fragment_shape, self.fragment_strides, start)

    def in_memory_order(self, values: Tensor) -> Tensor:
        """Return a parameter-shaped tensor's elements in the order of the parameter's memory.

        Args:
            values: of the parameter's shape and any strides.

        Returns:
            1-D, a copy.
        """
        return _ordered(values, self.strides)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter-shaped tensor, a copy in fragment shape.

        A rank that owns nothing gets no elements.
        """
        if not self.owned_numel:
            return whole.new_empty(0)
        owned = self.in_memory_order(whole)[slice(*self.owned)].clone()
        return owned.as_strided(self.fragment_shape, self.fragment_strides)

    def fragment_in_order(self, values: Tensor) -> Tensor:
        """Return a fragment-shaped tensor's elements in the parameter's order of memory, 1-D."""
        if self.contiguous:
            return values.reshape(-1)
        return _ordered(values, self.fragment_strides)


def _fragment_geometry(
    place: ParameterPlace, strides: tuple[int, ...], flat: FlatLayout, owned_numel: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a parameter's fragment."""
    if flat.cut == "flat":
        return (owned_numel,), (1,)
    if flat.cut == "whole" or not place.shape:
        return place.shape, strides
    # Dims inside of the outermost keep their strides, so these rows are dense, too.
    rows = owned_numel // max(row_length(place.shape, place.outer_dim), 1)
    shape = [rows if dim == place.outer_dim else n for dim, n in enumerate(place.shape)]
    return tuple(shape), strides


def _ordered(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    ordered = values.new_empty(values.numel())
    ordered.as_strided(values.shape, strides).copy_(values)
    return ordered


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
