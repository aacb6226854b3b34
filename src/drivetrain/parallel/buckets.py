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

from drivetrain.collectives.volume import ParameterRow, Stretch
from drivetrain.errors import UsageError
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


# --- byte buffers of one constant size, lent and reused: ZeRO-R's constant buffers ---

# However large a model is, tensors fused for one message are cut to one size, and a fixed number of
# buffers serves a whole run. Memory does not grow with the model, and the allocator has no holes to
# fill.


class BufferPool:
    """Lends contiguous buffers of ``nbytes`` each, ``capacity_buffers`` at most on each device.

    A buffer is allocated when it is first needed. The buffer that was given back longest ago is
    lent next, to leave work that still reads a buffer the most time. The pool itself waits for
    nothing: a buffer is given back when nothing reads it any more. One thread at a time.

    Raises:
        UsageError: a capacity or size below 1.
    """

    def __init__(self, capacity_buffers: int, nbytes: int) -> None:
        if capacity_buffers < 1 or nbytes < 1:
            raise UsageError(
                "expected a pool of at least 1 buffer of at least 1 byte, found "
                f"{capacity_buffers} of {nbytes}"
            )
        self.capacity_buffers = capacity_buffers
        self.buffer_nbytes = nbytes
        self._free: dict[torch.device, list[Tensor]] = {}
        self._lent: dict[int, Tensor] = {}  # the buffer by its storage

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that exist, lent or free."""
        return self.buffer_nbytes * (len(self._lent) + sum(map(len, self._free.values())))

    def take(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Lend a buffer.

        Args:
            numel: elements that are needed; 0 takes a whole buffer as well.
            dtype: their dtype.
            device: where the buffer lies.

        Returns:
            A 1-D view (numel,) of a buffer; its values are arbitrary.

        Raises:
            UsageError: the elements do not fit into a buffer of the constant size.
            LookupError: all buffers of the device are lent.
        """
        needed = numel * dtype.itemsize
        if needed > self.buffer_nbytes:
            raise UsageError(
                f"expected at most {self.buffer_nbytes} bytes, the size of every buffer of this "
                f"pool, found {numel} elements of {dtype} = {needed} bytes; cut the tensor into "
                "pieces, or make the pool's buffers larger"
            )
        where = torch.empty(0, device=device).device  # with the index: cuda is cuda:0
        free = self._free.setdefault(where, [])
        buffer = free.pop(0) if free else self._allocate(where)
        self._lent[buffer.untyped_storage()._cdata] = buffer
        # The last bytes of a size that no element divides are left over.
        whole = buffer.numel() // dtype.itemsize * dtype.itemsize
        return buffer[:whole].view(dtype)[:numel]

    def give_back(self, tensor: Tensor) -> None:
        """Take a lent buffer back, given as the result of ``take`` or any view of it.

        Raises:
            UsageError: the tensor is not in a buffer that is lent now.
        """
        buffer = self._lent.pop(tensor.untyped_storage()._cdata, None)
        if buffer is None:
            raise UsageError(
                f"expected a tensor that take() returned and that is still out, found one of shape "
                f"{tuple(tensor.shape)} on {tensor.device}; give each buffer back once"
            )
        self._free[buffer.device].append(buffer)

    def close(self) -> None:
        """Forget every buffer; lent ones live on with their borrowers."""
        self._free.clear()
        self._lent.clear()

    def _allocate(self, device: torch.device) -> Tensor:
        out = sum(buffer.device == device for buffer in self._lent.values())
        if out >= self.capacity_buffers:
            raise LookupError(
                f"all {self.capacity_buffers} buffers on {device} are lent; give one back first"
            )
        return torch.empty(self.buffer_nbytes, dtype=torch.uint8, device=device)


class LentBuffers:
    """Buffers for a few borrowers at once: from a pool, and further buffers in need.

    Args:
        in_flight: how many may be lent at once; 0: none are.
        nbytes: size of the pool's buffers.
        device: where they live.
    """

    def __init__(self, in_flight: int, nbytes: int, device: torch.device) -> None:
        self.in_flight = in_flight
        self._each = nbytes
        self._device = device
        self._pool = BufferPool(in_flight, nbytes) if in_flight and nbytes else None
        self._out: dict[int, bool] = {}  # whether it is the pool's, by storage

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept for lending."""
        return self._pool.nbytes if self._pool is not None else 0

    @property
    def exhausted(self) -> bool:
        """Whether as many are out as there may be."""
        return len(self._out) >= self.in_flight

    def take(self, nbytes: int) -> Tensor:
        """Lend a buffer of so many bytes, 1-D; one in need is not kept afterwards."""
        fits = nbytes <= self._each and not self.exhausted
        if self._pool is not None and fits:
            buffer = self._pool.take(nbytes, torch.uint8, self._device)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._out[buffer.untyped_storage()._cdata] = fits
        return buffer

    def take_back(self, buffer: Tensor) -> None:
        """Take a lent buffer back."""
        pooled = self._out.pop(buffer.untyped_storage()._cdata, False)
        if self._pool is not None and pooled:
            self._pool.give_back(buffer)

    def close(self) -> None:
        """Forget the pool's buffers."""
        if self._pool is not None:
            self._pool.close()
