"""What a step keeps alive: parameters or all memory at every operator, the resident peak."""

import ctypes
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveParameters(TorchDispatchMode):
    """Counts at every operator the bytes of storages that parameters have, had, or arrive in.

    A sharded parameter's storage stays and gives its memory back, so one that was seen once is
    watched on. FSDP2 gathers into a buffer and copies from there: it counts while it is alive.

    Args:
        model: its parameters are looked at anew each time: FSDP2 exchanges them.
        shards: what the optimizer updates.

    Attributes:
        shards: bytes of the shards.
        peak: the largest sum so far.
    """

    def __init__(self, model: nn.Module, shards: Iterable[Tensor]) -> None:
        super().__init__()
        self._model = model
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._buffers: list[tuple[StorageWeakRef, int]] = []
        for tensor in shards:
            self._watch(tensor)
        self.shards = self._bytes()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for parameter in self._model.parameters():
            self._watch(parameter)
        if func is torch.ops.c10d._allgather_base_.default:
            storage = args[0].untyped_storage()
            if storage._cdata not in self._storages:
                self._buffers.append((StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self._bytes())
        return func(*args, **(kwargs or {}))

    def _watch(self, tensor: Tensor) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
        self._storages[storage._cdata] = storage

    def _bytes(self) -> int:
        self._buffers = [(held, size) for held, size in self._buffers if not held.expired()]
        arriving = sum(size for _, size in self._buffers)
        return arriving + sum(storage.nbytes() for storage in self._storages.values())


class _Mallinfo(ctypes.Structure):
    """The numbers of ``mallinfo2`` of the C library, in bytes."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def allocated() -> int:
    """Return the bytes that the process has got from the C library and not given back."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


class AllocatedPeak(TorchDispatchMode):
    """Looks behind every operator how much memory the process has allocated, of every kind.

    Attributes:
        peak: the most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, allocated())
        return result


def forget_peak() -> None:
    """Hand back what the C library keeps, and count the peak of resident memory from here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident(key: str) -> int:
    """Return resident memory in bytes: now (``VmRSS``) or at its peak (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")
