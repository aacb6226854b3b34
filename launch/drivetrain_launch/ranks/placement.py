"""The ranks of this host: how many, their slots among all, their address, threads and heap."""

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from drivetrain.config import LaunchConfig
from drivetrain.errors import ConfigError, in_words

LOOPBACK = "127.0.0.1"

MOST_RANKS = 2**17
"""A run of more is a slip of the keyboard: the largest clusters have as many devices."""

_MMAP_THRESHOLD = 32 << 20
"""Smallest block that is mapped and unmapped by itself; glibc allows no more."""

_TRIM_THRESHOLD = 1 << 40
"""Free memory at the end of the heap that is kept: all of it."""

_TUNABLES = "GLIBC_TUNABLES"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and port where several hosts meet."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Read ``HOST:PORT``; an IPv6 address stands in brackets.

        Raises:
            ConfigError: the text is something else.
        """
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\s]+)):(\d{1,5})", text)
        if match is None or not 1 <= int(match[3]) <= 65535:
            raise ConfigError(
                "launch.rdzv_endpoint: expected HOST:PORT with a port from 1 to 65535, such as "
                f"10.0.0.1:29400, found {text!r}"
            )
        return cls(match[1] or match[2], int(match[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The slot of a single rank on its host, where a scheduler starts each rank by itself.

    Attributes:
        local_rank: its index on the host.
        local_size: number of ranks of the host; 0 where the scheduler does not tell it.
    """

    local_rank: int = 0
    local_size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostJob:
    """The work of this host: a script, and the number and environment of its ranks.

    Attributes:
        arguments: ``(SCRIPT, ...)`` or ``("-m", MODULE, ...)``.
        ranks: number of processes on this host.
        launch: the launch section of the configuration.
        variables: environment variables that every rank gets besides this process's own.
        private: folder of this run, readable by this user only, removed by the caller.
        config: file of the resolved configuration, beside which ranks leave marks.
        run: a scheduler's name of the job, equal on every host, or "".
        slot: of the one rank here, where a scheduler starts each rank by itself.
        software: facts that must be equal on all hosts, by their names.
        backend: the ranks' communication library.
    """

    arguments: tuple[str, ...]
    ranks: int
    launch: LaunchConfig
    variables: Mapping[str, str]
    private: Path
    config: Path
    run: str = ""
    slot: Slot | None = None
    software: Mapping[str, str] = field(default_factory=dict)
    backend: str = "gloo"

    @property
    def identity(self) -> dict[str, str]:
        """Values without which a launcher is not of this run, by their names in a message."""
        least, count = self.launch.least_nnodes, self.launch.nnodes
        few = f"{least} to " if least < count else ""
        return {"the number of hosts": f"{few}{count}", "the job": self.run}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The numbers of this launcher's ranks among all ranks, for one attempt.

    Attributes:
        attempt: number of the attempt, from 0, the same on every host.
        sizes: number of ranks of each launcher, in order.
        index: this launcher's index in ``sizes``.
        port: of the store on this host's loopback, through which ranks find each other.
        address: of this host for the other hosts.
        nodes: for each launcher the index of its machine: launchers that a scheduler starts for
            one rank each may share a machine. Empty: each has a machine of its own.
        link: bytes per second between hosts that were measured; 0 where they were not.
    """

    attempt: int
    sizes: Sequence[int]
    index: int
    port: int
    address: str = LOOPBACK
    nodes: Sequence[int] = ()
    link: float = 0.0

    @property
    def node(self) -> int:
        """Index of this launcher's machine."""
        return self.nodes[self.index] if self.nodes else self.index

    @property
    def neighbors(self) -> Sequence[int]:
        """Indices of the launchers on this machine, this one among them."""
        nodes = self.nodes or range(len(self.sizes))
        return [index for index, node in enumerate(nodes) if node == self.node]

    @property
    def first_rank(self) -> int:
        """Global rank of the first rank here."""
        return sum(self.sizes[: self.index])

    @property
    def size(self) -> int:
        """Number of ranks here."""
        return self.sizes[self.index]

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return sum(self.sizes)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def accelerators() -> int:
    """Return the number of accelerators of this host; imports torch."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def backend_of(accelerators: int) -> str:
    """Return the communication library that ranks of this host choose; imports torch."""
    if not accelerators:
        return "gloo"
    import torch
    import torch.distributed as dist

    device = torch.accelerator.current_accelerator()
    return "gloo" if device is None else dist.get_default_backend_for_device(device)


def local_ranks(launch: LaunchConfig, *, accelerators: int, cores: int) -> int:
    """Return how many ranks this host runs.

    Raises:
        ConfigError: there are accelerators, but fewer than ranks.
    """
    available = 0 if launch.device == "cpu" else accelerators
    if launch.nproc_per_node == "auto":
        return available or cores
    if available and launch.nproc_per_node > available:
        raise ConfigError(
            f"expected an accelerator for each of the {launch.nproc_per_node} ranks of this host, "
            f"found {available}; start at most {available} with --nproc-per-node, or compute on "
            "the CPU with --cpu"
        )
    return launch.nproc_per_node


def threads(launch: LaunchConfig, ranks: int, *, cores: int) -> str | None:
    """Return the value of OMP_NUM_THREADS for each rank; None leaves the user's own value."""
    if launch.threads_per_rank != "auto":
        return str(launch.threads_per_rank)
    return None if os.environ.get("OMP_NUM_THREADS") else str(max(1, cores // ranks))


def heap_variables(launch: LaunchConfig, *, accelerators: int) -> Mapping[str, str]:
    """Return the variables that make glibc keep freed memory for the next step, for each rank.

    A training step on the CPU frees and allocates gigabytes: activations, gradients, gathered
    units. glibc hands large blocks back to the system, which must fill each page with zeros before
    the next step gets the page again: a quarter of the time of a small model's step.

    There are none where the user has made settings of the same kind. Other C libraries ignore them.
    Ranks that compute on accelerators keep their memory there, where torch has a pool of its own.
    """
    variables = {
        "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD),
    }
    chosen = any(os.environ.get(name) for name in variables)
    chosen = chosen or "malloc" in os.environ.get(_TUNABLES, "")
    return variables if launch.keep_memory and not accelerators and not chosen else {}


def check_hosts(launch: LaunchConfig) -> None:
    """Check that the settings for several hosts fit together.

    Raises:
        ConfigError: the endpoint is missing or malformed, or the host's index is too large.
    """
    if launch.node_rank >= launch.nnodes:
        raise ConfigError(
            f"launch.node_rank: expected 0 to {launch.nnodes - 1} with nnodes {launch.nnodes}, "
            f"found {launch.node_rank}; set --nnodes to the number of hosts"
        )
    if launch.least_nnodes > launch.nnodes:
        raise ConfigError(
            f"launch.min_nnodes: expected at most nnodes, {launch.nnodes}, found "
            f"{launch.min_nnodes}; give --nnodes MIN:MAX, such as 2:4"
        )
    if launch.nnodes > 1 and not launch.rdzv_endpoint:
        raise ConfigError(
            f"launch.rdzv_endpoint: expected HOST:PORT of host 0 with nnodes {launch.nnodes}, "
            "found none; give every host the same --rdzv-endpoint"
        )
    if launch.rdzv_endpoint:
        Endpoint.parse(launch.rdzv_endpoint)


def check_size(ranks: int, nodes: int) -> int:
    """Return the number of ranks of so many hosts with as many ranks on each.

    Raises:
        ConfigError: there are more ranks than any machine has: their list would fill the memory.
    """
    if ranks * nodes > MOST_RANKS:
        raise ConfigError(
            f"expected at most {MOST_RANKS:,} ranks, found {ranks * nodes:,} on {nodes:,} hosts; "
            "check nproc_per_node and nnodes"
        )
    return ranks * nodes


def listening_address(endpoint: Endpoint) -> str:
    """Return the address on which host 0 listens: the endpoint's, and no other network's.

    Some systems give a host's own name the address 127.0.1.1, at which no other host reaches it.
    For such a name host 0 listens on every interface: "".

    Raises:
        ConfigError: the endpoint is not on this host, or another process listens there.
    """
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"cannot find the address of {endpoint.host!r}: {in_words(error)}; expected a name or "
            "an address of host 0 in --rdzv-endpoint"
        ) from error
    family, _, _, _, place = found[0]
    address = str(place[0])
    named = not ip_version(endpoint.host) and endpoint.host != "localhost"
    address = "" if named and ipaddress.ip_address(address).is_loopback else address
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, endpoint.port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"{endpoint.host} is no address of this host, which has --node-rank 0; give "
                    "each host its own --node-rank, and --rdzv-endpoint an address of host 0"
                ) from error
            raise ConfigError(
                f"cannot listen on port {endpoint.port}: {error.strerror}{_holder(endpoint.port)}; "
                "choose another port in --rdzv-endpoint or stop the process that has it"
            ) from error
    return address


def ip_version(text: str) -> int:
    """Return the version of IP of an address; 0 for a name."""
    try:
        return ipaddress.ip_address(text).version
    except ValueError:
        return 0


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address; None when there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def _holder(port: int) -> str:
    """Return a remark about the process that listens on a port; "" when none is known."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,):
            return f" (process {connection.pid} has it)" if connection.pid else ""
    return ""
