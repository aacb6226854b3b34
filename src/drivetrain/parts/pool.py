"""Byte buffers of one constant size, lent and reused: ZeRO-R's constant buffers.

However large a model is, tensors fused for one message are cut to one size, and a fixed number of
buffers serves a whole run. Memory does not grow with the model, and the allocator has no holes to
fill.
"""

import torch
from torch import Tensor

from drivetrain.errors import UsageError


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
