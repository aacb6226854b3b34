"""The ranks of this host: how many, their slots among all, their address, threads and heap.

The environment says which scheduler started this process, and its place in the run. Variables are
read with errors that name them.
"""

import errno
import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from drivetrain.config import LaunchConfig
from drivetrain.config.document import Layer, ValueOrigin
from drivetrain.errors import ConfigError, refusing

# --- the ranks of this host ---

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
    wanted = "expected a name or an address of host 0 in --rdzv-endpoint"
    with refusing(f"cannot find the address of {endpoint.host!r}", wanted):
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
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


# --- the place of this host in the run, from the environment ---

OVERRIDE = (
    "correct it, or give --nnodes, --node-rank and --rdzv-endpoint, with which no variables are "
    "read; --standalone stands for one host"
)


class Variables(dict[str, str]):
    """Texts of environment variables by name."""

    def text(self, name: str) -> str:
        """Return a variable's text; "" when it is not set."""
        return self.get(name, "")

    def first(self, *names: str) -> str:
        """Return the first name that is set, or the first of all."""
        return next((name for name in names if self.text(name)), names[0])

    def require(self, launcher: str, *names: str) -> None:
        """Check that variables are set.

        Raises:
            ConfigError: some are not.
        """
        missing = [name for name in names if not self.text(name)]
        if missing:
            there = [name for name in names if name not in missing]
            found = f"{', '.join(there)} alone" if there else "none of them"
            raise ConfigError(
                f"{launcher}: expected the variables {', '.join(names)}, found {found}; set "
                f"{', '.join(missing)}, or give --nnodes, --node-rank and --rdzv-endpoint"
            )

    def number(self, name: str, *, minimum: int = 0) -> int:
        """Return a variable's whole number.

        Raises:
            ConfigError: the text is something else.
        """
        text = self.text(name)
        if not text.isdecimal() or int(text) < minimum:
            raise ConfigError(
                f"the variable {name}: expected a whole number of at least {minimum}, found "
                f"{text!r}; {OVERRIDE}"
            )
        return int(text)

    def index(self, name: str, count_name: str, count: int = 0) -> int:
        """Return an index below a count, which may be known already.

        Raises:
            ConfigError: the two variables contradict each other.
        """
        index, count = self.number(name), count or self.number(count_name, minimum=1)
        if index >= count:
            raise ConfigError(
                f"the variables {name}={index} and {count_name}={count} contradict each other: "
                f"expected an index from 0 to {count - 1}; {OVERRIDE}"
            )
        return index

    def slot(self, name: str, count_name: str) -> Slot:
        """Return a rank's slot from its index on the host and the number of ranks there."""
        return Slot(local_rank=self.index(name, count_name), local_size=self.number(count_name))

    def shown(self, *names: str) -> str:
        """Return ``NAME=TEXT`` of variables that are set, for the user."""
        return ", ".join(f"{name}={self.text(name)}" for name in names if self.text(name))


# --- SLURM's words: lists of nodes and of tasks per node, read without its programs ---

# Containers seldom have ``scontrol``.


_PART = re.compile(r"([^,\[\]]+|\[[^\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def node_names(text: str) -> list[str]:
    """Return the nodes of a list such as ``n[1-3,7],gpu-[01-02]``, in order.

    Raises:
        ConfigError: the text is no list of nodes.
    """
    parts = [match[0] for match in _PART.finditer(text)]
    if not parts or ",".join(parts) != text:
        raise _unread("a list of nodes such as n[1-3,7]", text)
    return [name for part in parts for name in _expanded(part)]


def tasks_on(text: str, node: int) -> int:
    """Return the number of tasks on a node from a text such as ``4(x2),3``.

    Raises:
        ConfigError: the text is something else, or has no such node.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    if node >= len(counts):
        raise _unread(f"the tasks of node {node} in a list such as 4(x2),3", text)
    return counts[node]


def _unread(expected: str, found: str) -> ConfigError:
    return ConfigError(
        f"expected {expected} from SLURM, found {found!r}; give --nnodes, --node-rank and "
        "--rdzv-endpoint instead"
    )


def _expanded(part: str) -> list[str]:
    """Return the names of a part, with every bracket replaced by its numbers."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for word in inside.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise _unread("numbers such as 1-3,7 in a list of nodes", inside)
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [before + number + tail for number in numbers for tail in _expanded(after)]


# --- recognises from the environment which scheduler started this process ---

# Each recogniser turns the variables of one scheduler into keys of the configuration, with the
# variables as their origin. A scheduler starts one launcher per host, or one process per device; in
# the second case each process has a launcher of one rank; its slot tells its place among the ranks
# of the machine, and the launchers find out which of them share a machine.


FIRST_PORT = 20_000
PORTS = 12_000
"""Ports that follow from a job's number; the system gives out ports from 32768 on."""

USUAL_PORT = "29500"
"""torch's own, where a launcher gives an address without a port."""

SKYPILOT_PORT = 8008
FEWEST_KEY = "launch.min_nnodes"
KEYS = ("launch.nnodes", "launch.node_rank", "launch.rdzv_endpoint")
"""Keys that tell of several hosts; a recogniser gives all of them."""


Entries: TypeAlias = tuple[tuple[str, Any, str], ...]
"""(key of the configuration, value, variables) of each value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The facts in a scheduler's variables.

    Attributes:
        name: of the scheduler.
        entries: the values.
        run: the scheduler's name of the job, equal on every host, or "".
        slot: of the one rank of this process among the ranks of its host; None where this
            process starts all ranks of its host.
    """

    name: str
    entries: Entries
    run: str = ""
    slot: Slot | None = None

    @property
    def layer(self) -> Layer:
        """The values as a layer of configuration."""
        return Layer.of(
            (key, value, ValueOrigin("environment", f"{self.name}: {variables}"))
            for key, value, variables in self.entries
        )


def recognise(environment: Mapping[str, str]) -> Surroundings | None:
    """Return the facts about several hosts in the variables; None without any.

    Raises:
        ConfigError: variables are missing, malformed, or contradict each other.
    """
    variables = Variables(environment)
    for recogniser in RECOGNISERS:
        if (found := recogniser(variables)) is not None:
            return found
    return None


def check_agreement(surroundings: Surroundings, file: Layer) -> None:
    """Check that a configuration file does not contradict the scheduler.

    Raises:
        ConfigError: the file has another number of hosts, index or endpoint.
    """
    section = file.values.get("launch", {})
    for key, value, variables in surroundings.entries:
        name = key.rpartition(".")[2]
        found = section.get(name, value) if isinstance(section, Mapping) else value
        if key in KEYS and found != value:
            origin = file.origins.get(key)
            raise ConfigError(
                f"{origin.text if origin else 'the file'}: {key}: {found!r} contradicts {value!r} "
                f"from {surroundings.name} ({variables}); take the line out of the file, or give "
                "the flag, which switches the recognition off"
            )


def _pet(variables: Variables) -> Surroundings | None:
    """Torchrun's variables for its options, which Kubeflow's Trainer sets."""
    if not variables.text("PET_NNODES"):
        return None
    elastic = variables.text("PET_NNODES").partition(":")
    most = elastic[2] or elastic[0]
    count = int(most) if most.isdecimal() else variables.number("PET_NNODES")
    entries: list[tuple[str, Any, str]] = []
    if elastic[1] and elastic[0] != most:
        least = int(elastic[0]) if elastic[0].isdecimal() else variables.number("PET_NNODES")
        entries.append((FEWEST_KEY, least, variables.shown("PET_NNODES")))
    ranks = variables.text("PET_NPROC_PER_NODE")
    if ranks and ranks not in ("auto", "gpu", "cpu"):
        number = variables.number("PET_NPROC_PER_NODE", minimum=1)
        entries.append(("launch.nproc_per_node", number, variables.shown("PET_NPROC_PER_NODE")))
    if count > 1:
        rank = variables.first("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
        place, said = variables.text("PET_RDZV_ENDPOINT"), variables.shown("PET_RDZV_ENDPOINT")
        needed = ("PET_NNODES", rank) if place else ("PET_NNODES", rank, "PET_MASTER_ADDR")
        variables.require("torchrun's PET variables", *needed)
        if not place:
            place = _master(variables, "PET_")
            said = variables.shown("PET_MASTER_ADDR", "PET_MASTER_PORT")
        entries += _hosts(variables, "PET_NNODES", rank, place, said, count)
    run = variables.text("PET_RDZV_ID")
    return Surroundings(name="torchrun's variables", entries=tuple(entries), run=run)


def _mpi(name: str, rank: str, size: str, local: str, local_size: str) -> Callable[..., Any]:
    """Return the recogniser of an MPI: one process per device."""

    def recogniser(variables: Variables) -> Surroundings | None:
        if not variables.text(rank) or variables.number(size, minimum=1) == 1:
            return None
        variables.require(name, rank, size, local, local_size)
        first, slot = not variables.index(rank, size), variables.slot(local, local_size)
        if variables.text("MASTER_ADDR"):
            entries = _one_rank(variables, size, rank, _master(variables), "MASTER_ADDR")
            return Surroundings(name=name, entries=entries, slot=slot)
        on_one_host = slot.local_size == variables.number(size)
        host, job, said = _first_of_open_mpi(name, variables, first, on_one_host)
        port = variables.text("MASTER_PORT") or str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)
        entries = _one_rank(variables, size, rank, _endpoint(host, port), said)
        return Surroundings(name=name, entries=entries, slot=slot, run=job)

    return recogniser


def _first_of_open_mpi(
    name: str, variables: Variables, first: bool, on_one_host: bool
) -> tuple[str, str, str]:
    """Return the first process's address, the job, and the variable that told it.

    ``mpirun`` of Open MPI 4 tells all processes the addresses of its own host, where it starts the
    first process, unless a list of hosts says otherwise. Of several nobody knows which one all
    hosts reach.
    """
    uri, job = "OMPI_MCA_orte_hnp_uri", variables.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    found = re.search(r"tcp6?://\[?([^];]+?)\]?:\d+", variables.text(uri))
    hosts = [LOOPBACK] if on_one_host else found[1].split(",") if found else []
    own = {each.address.partition("%")[0] for each in chain(*psutil.net_if_addrs().values())}
    if len(hosts) != 1 or not variables.text(job) or (first and hosts[0] not in own):
        raise ConfigError(
            f"{name} tells no process the address of the first: expected the variable "
            "MASTER_ADDR, found none; give it to all of them, for example 'mpirun -x "
            "MASTER_ADDR=$(hostname) ...'"
        )
    return hosts[0], variables.text(job), job if on_one_host else uri


def _slurm(variables: Variables) -> Surroundings | None:
    """A step of SLURM: one task per node, or one per device."""
    if not variables.text("SLURM_JOB_ID"):
        return None
    nodes_name = variables.first("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    nodes = variables.number(nodes_name, minimum=1) if variables.text(nodes_name) else 1
    if not variables.text("SLURM_STEP_ID") or not variables.text("SLURM_PROCID"):
        if nodes == 1:
            return None
        raise ConfigError(
            f"SLURM gave this job {nodes} nodes ({variables.shown(nodes_name)}), and this process "
            "runs on one of them alone; write 'srun --ntasks-per-node=1' before 'drivetrain "
            "launch', or give --standalone for one host"
        )
    tasks_name = variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    list_name = variables.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    variables.require("SLURM", "SLURM_NODEID", list_name, tasks_name)
    tasks = variables.number(tasks_name, minimum=1)
    if tasks == 1:
        return None
    names = node_names(variables.text(list_name))
    if len(names) != nodes:
        raise ConfigError(
            f"the variables {variables.shown(nodes_name)} and {variables.shown(list_name)} "
            f"contradict each other; {OVERRIDE}"
        )
    job, step = variables.number("SLURM_JOB_ID"), variables.number("SLURM_STEP_ID")
    place = _endpoint(names[0], str(FIRST_PORT + (job * 10 + step) % PORTS))
    run = f"{job}.{step}"
    if tasks == nodes:
        said = variables.shown(list_name, "SLURM_JOB_ID")
        entries = _hosts(variables, nodes_name, "SLURM_NODEID", place, said)
        return Surroundings(name="SLURM", entries=entries, run=run)
    per_node = variables.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    variables.require("SLURM", "SLURM_LOCALID", per_node)
    entries = _one_rank(variables, tasks_name, "SLURM_PROCID", place, list_name)
    local_size = tasks_on(variables.text(per_node), variables.number("SLURM_NODEID"))
    slot = Slot(local_rank=variables.number("SLURM_LOCALID"), local_size=local_size)
    return Surroundings(name="SLURM", entries=entries, run=run, slot=slot)


def _skypilot(variables: Variables) -> Surroundings | None:
    """SkyPilot: one process per host, addresses of all of them."""
    addresses = variables.text("SKYPILOT_NODE_IPS").split()
    if len(addresses) < 2:
        return None
    count_name = "SKYPILOT_NUM_NODES"
    variables.require("SkyPilot", "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", count_name)
    if variables.number(count_name) != len(addresses):
        raise ConfigError(
            f"the variables {count_name}={variables.text(count_name)} and SKYPILOT_NODE_IPS with "
            f"{len(addresses)} addresses contradict each other; {OVERRIDE}"
        )
    place = _endpoint(addresses[0], str(SKYPILOT_PORT))
    entries = _hosts(variables, count_name, "SKYPILOT_NODE_RANK", place, "SKYPILOT_NODE_IPS")
    return Surroundings(name="SkyPilot", entries=entries, run=variables.text("SKYPILOT_TASK_ID"))


def _plain(variables: Variables) -> Surroundings | None:
    """``RANK`` and ``WORLD_SIZE`` that somebody has set for each process: one rank in each."""
    names = ("RANK", "WORLD_SIZE")
    if not any(map(variables.text, names)) or variables.text("DRIVETRAIN_CONFIG"):
        return None  # none, or a process that one of our ranks has started
    if variables.text("TORCHELASTIC_RUN_ID"):
        raise ConfigError(
            f"torchrun has started this process as rank {variables.text('RANK')} of "
            f"{variables.text('WORLD_SIZE')}; give torchrun the script itself, 'torchrun ... "
            "train.py', or leave torchrun out; --standalone starts a run of its own here"
        )
    variables.require("one process per rank", *names)
    if variables.number("WORLD_SIZE", minimum=1) == 1:
        return None
    variables.require("one process per rank", *names, "MASTER_ADDR")
    entries = _one_rank(variables, "WORLD_SIZE", "RANK", _master(variables), "MASTER_ADDR")
    told = variables.text("LOCAL_WORLD_SIZE")
    slot = variables.slot("LOCAL_RANK", "LOCAL_WORLD_SIZE") if told else Slot()
    return Surroundings(name="RANK and WORLD_SIZE", entries=entries, slot=slot)


def _hosts(
    variables: Variables, size: str, rank: str, place: str, said: str, count: int = 0
) -> Entries:
    """Return the entries about several hosts, from the variables of their number and index."""
    index = variables.index(rank, size, count)
    count = count or variables.number(size)
    return (
        ("launch.nnodes", count, variables.shown(size)),
        ("launch.node_rank", index, variables.shown(rank)),
        ("launch.rdzv_endpoint", place, said),
    )


def _one_rank(variables: Variables, size: str, rank: str, place: str, told: str) -> Entries:
    """Return the entries of a process that is one rank, and was told the place of the first."""
    alone = "launch.nproc_per_node", 1, f"one process per rank, {variables.shown(size)}"
    return alone, *_hosts(variables, size, rank, place, variables.shown(told))


def _master(variables: Variables, prefix: str = "") -> str:
    port = variables.text(f"{prefix}MASTER_PORT") or USUAL_PORT
    return _endpoint(variables.text(f"{prefix}MASTER_ADDR"), port)


def _endpoint(host: str, port: str) -> str:
    return str(Endpoint.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))


RECOGNISERS = (
    _pet,
    _mpi(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _slurm,
    _mpi("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    _mpi("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _skypilot,
    _plain,
)
"""In order: an explicit setting first, a launcher inside of a scheduler's job before it, and last
plain variables, which scripts for any scheduler set."""
