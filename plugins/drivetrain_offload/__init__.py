"""Offload: tensors kept in host memory or on a disk between their uses.

Papers: Ren et al., "ZeRO-Offload", USENIX ATC 2021; Rajbhandari et al., "ZeRO-Infinity", SC 2021
(section 5, the infinity offload engine). The idea of the stores in five lines:

1. A store keeps tensors by key; who uses it does not know where they lie.
2. ``cpu`` keeps them in host memory, page-locked, so that copies and computation overlap.
3. ``nvme`` keeps them in one preallocated file per rank: a full disk is known before step one.
4. Requests go past the page cache, several at once, from threads: system calls release the GIL.
5. The file has no name: nothing is left of it when the process ends, however it does.

An Adam step over P parameters of a rank reads 12 P bytes (master, two moments) and writes as many.

===============  =====================================================================
buffers.py       aligned and page-locked memory
host.py          the store ``cpu``
directory.py     what the directory of a store must be
heap.py          memory that is freed goes back to the system
files.py         one file without a name, several requests at once
nvme.py          the store ``nvme``
rules.py         what torch's optimizers keep for a parameter, and the kernel that updates it
tiles.py         that, over tiles of flat shards that stay in the cache
threads.py       threads that compute alone
stepping.py      steps of shards that a store keeps: blocks, counters, what both stores share
host_stepper.py  where states lie in host memory
nvme_stepper.py  where they lie on a disk
pipeline.py      reads tile i + 1, updates tile i, writes tile i - 1
bench.py         what a disk can do with it; ``command.py`` shows it
strategy.py      the strategy ``offload``: another one, with stores chosen; ``config.py`` its knobs
===============  =====================================================================
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_offload.buffers import aligned_empty
    from drivetrain_offload.config import OffloadConfig
    from drivetrain_offload.files import Transfer
    from drivetrain_offload.host import HostConfig, HostStore
    from drivetrain_offload.nvme import NvmeConfig, NvmeStore
    from drivetrain_offload.strategy import Offload

__all__ = [
    "HostConfig",
    "HostStore",
    "NvmeConfig",
    "NvmeStore",
    "Offload",
    "OffloadConfig",
    "Transfer",
    "aligned_empty",
]

_HOMES = {
    "HostConfig": "host",
    "HostStore": "host",
    "NvmeConfig": "nvme",
    "NvmeStore": "nvme",
    "Offload": "strategy",
    "OffloadConfig": "config",
    "Transfer": "files",
    "aligned_empty": "buffers",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: the command's help needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"drivetrain_offload.{_HOMES[name]}"), name)
