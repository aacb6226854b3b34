"""One parameter in its unit: where it lies, what this rank owns of it, and what optimizers hold."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from drivetrain.parts.buckets import is_dense
from drivetrain.sharding.layout import Place, row_length

if TYPE_CHECKING:
    from drivetrain.sharding.flat import Flat
    from drivetrain.sharding.kept import Kept


class Slot:
    """One parameter in its unit.

    Args:
        place: where it lies in its flat tensor.
        parameter: the user's own object.
        flat: the flat tensor.
        rank: this rank among those that share the unit.
        first: where its share begins in the rank's shard.

    Attributes:
        name: the parameter's name.
        parameter: the parameter.
        flat: the flat tensor that it lies in.
        unit: the unit that it is gathered with.
        shape: the parameter's shape.
        outer_dim: the dim that is outermost in memory.
        strides: its strides; the flat tensor holds it in this order.
        numel: its elements.
        span: where it lies in the flat tensor.
        owned: the (start, stop) of the parameter, in the order of its memory, that this rank owns.
        own: where its share lies in the flat tensor.
        local: where its share lies in this rank's shard.
        fragment_shape: shape of what the optimizer holds: 1-D, rows, or the parameter's own.
        fragment_strides: its strides.
        fragment: what the optimizer holds in the parameter's place; None where nothing is owned.
        kept: what a store keeps for the optimizer; None if that has it itself.
        round: the round in which its gradient last came.
        filled: whether its place in the gradient buffer holds a gradient.
    """

    __slots__ = (
        "filled",
        "flat",
        "fragment",
        "fragment_shape",
        "fragment_strides",
        "kept",
        "local",
        "name",
        "numel",
        "outer_dim",
        "own",
        "owned",
        "parameter",
        "round",
        "shape",
        "span",
        "strides",
        "unit",
    )

    def __init__(
        self, place: Place, parameter: nn.Parameter, flat: "Flat", rank: int, first: int
    ) -> None:
        self.name = place.name
        self.parameter = parameter
        self.flat = flat
        self.unit = flat.unit
        self.shape = place.shape
        self.outer_dim = place.outer_dim
        self.numel = place.numel
        self.strides = parameter.stride() if is_dense(parameter) else _plain(self.shape)
        self.span = slice(place.offset, place.offset + place.numel)
        self.owned = place.shares[rank]
        self.own = slice(place.offset + self.owned[0], place.offset + self.owned[1])
        self.local = slice(first, first + self.owned_numel)
        self.fragment_shape, self.fragment_strides = self._fragment_geometry()
        self.fragment: nn.Parameter | None = None
        self.kept: Kept | None = None
        self.round = 0
        self.filled = False

    @property
    def contiguous(self) -> bool:
        """Whether the order of memory is that of the flattened parameter."""
        return all(
            mine == usual or size == 1
            for mine, usual, size in zip(self.strides, _plain(self.shape), self.shape, strict=True)
        )

    @property
    def owned_numel(self) -> int:
        """Elements that this rank owns."""
        return self.owned[1] - self.owned[0]

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's place in a flat tensor, in the parameter's shape."""
        start = flat.storage_offset() + self.span.start
        return flat.as_strided(self.shape, self.strides, start)

    def piece(self, shard: Tensor) -> Tensor:
        """Return the share's place in a tensor like the rank's shard, in the fragment's shape."""
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

    def share_in_order(self, values: Tensor) -> Tensor:
        """Return a fragment-shaped tensor's elements in the parameter's order of memory, 1-D."""
        if self.contiguous:
            return values.reshape(-1)
        return _ordered(values, self.fragment_strides)

    def _fragment_geometry(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        cut = self.flat.layout.cut
        if cut == "flat":
            return (self.owned_numel,), (1,)
        if cut == "whole" or not self.shape:
            return self.shape, self.strides
        # Dims inside of the outermost keep their strides, so these rows are dense, too.
        rows = self.owned_numel // max(row_length(self.shape, self.outer_dim), 1)
        shape = [rows if dim == self.outer_dim else n for dim, n in enumerate(self.shape)]
        return tuple(shape), self.strides


def _ordered(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    ordered = values.new_empty(values.numel())
    ordered.as_strided(values.shape, strides).copy_(values)
    return ordered


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
