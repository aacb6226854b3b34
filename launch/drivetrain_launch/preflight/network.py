"""The network of a host as its ranks will use it: which transport, over which address."""

import os
import socket
from pathlib import Path
from typing import NamedTuple

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RDMA = Path("/sys/class/infiniband")
"""A folder with one entry per adapter that NCCL uses instead of TCP."""

INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""Variables that name the interfaces of a backend, separated by commas."""


class Transport(NamedTuple):
    """How ranks send to other hosts.

    Attributes:
        name: for the user.
        measured: whether a measurement over TCP tells how fast it is.
    """

    name: str
    measured: bool


def machine_id() -> str:
    """Return a text that is equal for all processes of this machine, or of this container."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def transport_of(backend: str, adapters: Path = RDMA) -> Transport:
    """Return the transport that a backend chooses on this host."""
    found = sorted(path.name for path in adapters.iterdir()) if adapters.is_dir() else []
    disabled = os.environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    if backend == "nccl" and found and not disabled:
        return Transport(f"NCCL over {', '.join(found)}, not measured", False)
    names = {"nccl": "NCCL", "gloo": "gloo"}
    return Transport(f"{names.get(backend, backend)} over TCP", backend in names)


def chosen_address(backend: str, default: str) -> str:
    """Return the address of the interface that the user has named, or the default."""
    chosen = os.environ.get(INTERFACES.get(backend, ""), "").removeprefix("=")
    family = socket.AF_INET6 if ":" in default else socket.AF_INET
    for name in filter(None, chosen.split(",")):
        for entry in psutil.net_if_addrs().get(name, ()):
            if entry.family == family:
                return str(entry.address)
    return default
