"""Flat gradient buckets: many parameters' gradients side by side in one tensor that is sent whole.

A bucket's flat tensor ends in a tail of one element per parameter, 1 when this rank has a gradient
for it and 0 when not. The tail is reduced with the rest, so that every rank learns without another
message whether any rank had a gradient for a parameter::

    | gradient of p0 | gradient of p1 | gradient of p2 | has p0 | has p1 | has p2 |
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain.shards import is_dense

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The parameters of a bucket, as cost estimates see them.

    Attributes:
        members: indices of its parameters in the sequence that was planned, in order.
        shapes: their shapes.
        dtype: their dtype.
    """

    members: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the flat tensor, the tail included."""
        return sum(torch.Size(shape).numel() for shape in self.shapes) + len(self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.numel * self.dtype.itemsize

    def stretch(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Stretch:
        """Describe the flat tensor; the tail belongs to no parameter.

        Args:
            names: of all parameters in the sequence that was planned.
            dtype: in which the gradients are sent; None: their own.
        """
        starts = itertools.accumulate((prod(shape) for shape in self.shapes), initial=0)
        rows = [
            ParameterRow(names[member], shape, 0, start)
            for member, shape, start in zip(self.members, self.shapes, starts, strict=False)
        ]
        return Stretch.of(self.numel, dtype or self.dtype, rows)


def plan_buckets(
    shapes: Sequence[tuple[int, ...]],
    kinds: Sequence[tuple[torch.dtype, Hashable]],
    order: Sequence[int],
    *,
    bucket_bytes: int,
    first_bytes: int,
) -> list[BucketLayout]:
    """Cut parameters into buckets of one kind each.

    Args:
        shapes: shape of each parameter.
        kinds: dtype and device of each parameter; only equal kinds share a bucket.
        order: indices of the parameters in the order in which their gradients become ready.
        bucket_bytes: most bytes of gradients in a bucket; a larger parameter is alone in one.
        first_bytes: most bytes in the first bucket of each kind, which should start early.

    Returns:
        The buckets in the order in which their last gradient becomes ready.
    """
    groups: list[list[int]] = []
    latest: dict[tuple[torch.dtype, Hashable], list[int]] = {}
    sizes: dict[tuple[torch.dtype, Hashable], int] = {}
    limits: dict[tuple[torch.dtype, Hashable], int] = {}
    for index in order:
        kind = kinds[index]
        nbytes = torch.Size(shapes[index]).numel() * kind[0].itemsize
        if kind not in latest or sizes[kind] + nbytes > limits[kind]:
            limits[kind] = bucket_bytes if kind in latest else first_bytes
            latest[kind], sizes[kind] = [], 0
            groups.append(latest[kind])
        latest[kind].append(index)
        sizes[kind] += nbytes
    position = {index: place for place, index in enumerate(order)}
    groups.sort(key=lambda members: position[members[-1]])
    return [
        BucketLayout(tuple(members), tuple(tuple(shapes[i]) for i in members), kinds[members[0]][0])
        for members in groups
    ]


class Bucket:
    """One flat tensor and its views.

    Args:
        layout: of the parameters.
        parameters: in order.
        names: of all parameters in the sequence that was planned.

    Attributes:
        layout: of the parameters.
        names: of all parameters in the sequence that was planned.
        parameters: in order.
        flat: 1-D, the gradients and the tail.
        views: a view of ``flat`` per parameter, with its shape and, when dense, its strides.
        flags: the tail of ``flat``.
    """

    def __init__(
        self, layout: BucketLayout, parameters: Sequence[nn.Parameter], names: Sequence[str]
    ) -> None:
        self.layout = layout
        self.names = names
        self.parameters = tuple(parameters)
        self.flat = torch.zeros(layout.numel, dtype=layout.dtype, device=parameters[0].device)
        sizes = [parameter.numel() for parameter in parameters]
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self.views = [self.view(place) for place in range(len(self.parameters))]
        self.flags = self.flat[self._starts[-1] :]

    def view(self, place: int) -> Tensor:
        """Return the place of a parameter's gradient.

        To autograd it is no view of another tensor: scripts call ``detach_()`` on gradients.
        """
        view = view_like(self.flat, self._starts[place], self.parameters[place])
        return self.flat.new_empty(0).set_(
            view.untyped_storage(), view.storage_offset(), view.shape, view.stride()
        )


def view_like(flat: Tensor, offset: int, tensor: Tensor) -> Tensor:
    """Return a view of a 1-D tensor from an offset on, with another tensor's shape.

    The view has the tensor's strides too when these are dense (as after ``channels_last`` or a
    transposition); otherwise it is contiguous.
    """
    piece = flat[offset : offset + tensor.numel()]
    if is_dense(tensor):
        return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())
    return piece.view(tensor.shape)
