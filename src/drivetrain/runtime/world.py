"""This process among all: rank, device, backend, hosts; the status it leaves for the others.

Besides the launcher, this is the only file that reads the environment. The variables are torchrun's
own, so ``torchrun train.py`` and ``drivetrain launch train.py`` look the same from here.

The status lies in the store where the ranks met: a rank's wait for others, or its end. A rank
speaks on slow paths alone: when it has waited for a while, and when it ends. Others read the status
when their own wait fails or takes long, and learn who is missing, and why.
"""

import atexit
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from drivetrain.errors import PreflightError, UsageError

CPU = torch.device("cpu")
"""Named everywhere: a script may have set another default device."""


def gather_texts(
    text: str,
    size: int,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None,
    main_only: bool = False,
) -> list[str]:
    """Return the texts of all ranks, on all ranks. Collective.

    Args:
        text: of this rank.
        size: number of ranks.
        group: of the ranks; None means all.
        device: from which the group can send; None: the host.
        main_only: whether global rank 0 alone receives them, and the others an empty list.
    """
    device = device or CPU
    mine = _bytes_of(text)
    lengths = torch.zeros(size, 1, dtype=torch.int64, device=device)
    length = torch.tensor([mine.numel()], dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.unbind()), length, group=group)
    counts = [int(count) for count in lengths.flatten().tolist()]
    sent = torch.zeros(max(counts), dtype=torch.uint8, device=device)  # up to the longest
    sent[: mine.numel()] = mine
    receives = not main_only or dist.get_rank() == 0
    received = sent.new_empty(size if receives else 0, sent.numel())
    rows = list(received.unbind())
    if sent.numel() and main_only:
        dist.gather(sent, rows if receives else None, dst=0, group=group)
    elif sent.numel():
        dist.all_gather(rows, sent, group=group)
    pairs = zip(received.cpu(), counts, strict=receives)
    return [_text_of(row[:count]) for row, count in pairs]


def share_text(text: str, *, group: dist.ProcessGroup | None, device: torch.device | None) -> str:
    """Return the text of global rank 0, on all ranks. Collective.

    Args:
        text: of this rank; others than rank 0 may pass any.
        group: of the ranks; None means all.
        device: from which the group can send; None: the host.
    """
    device = device or CPU
    mine = _bytes_of(text if dist.get_rank() == 0 else "")
    length = torch.tensor([mine.numel()], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0, group=group)
    sent = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    sent[: mine.numel()] = mine
    if sent.numel():
        dist.broadcast(sent, src=0, group=group)
    return _text_of(sent.cpu())


def _bytes_of(text: str) -> Tensor:
    data = bytearray(text.encode())
    if not data:
        return torch.zeros(0, dtype=torch.uint8, device=CPU)
    return torch.frombuffer(data, dtype=torch.uint8)


def _text_of(data: Tensor) -> str:
    memory = bytearray(data.numel())
    if memory:
        torch.frombuffer(memory, dtype=torch.uint8).copy_(data)
    return memory.decode()


# --- the world ---


CONFIG_VARIABLE = "DRIVETRAIN_CONFIG"
"""Environment variable with the path of the run's configuration file."""

RECORD_VARIABLE = "DRIVETRAIN_RECORD"
"""Environment variable with the path of a file that asks to record a run, for a comparison."""

LINK_VARIABLE = "DRIVETRAIN_HOST_LINK"
"""Environment variable with the bytes per second that the launchers measured between hosts."""

WORK_VARIABLE = "DRIVETRAIN_WORK"
"""Environment variable with the path of the file in which a rank tells its launcher its times."""

MEMORY_VARIABLE = "DRIVETRAIN_MEMORY"
"""Environment variable with the path of the launcher's folder in memory, for checkpoints."""

LOOPBACK = "127.0.0.1"
"""Address that only processes of the same host reach."""

LAST_WORK_S = 0.05
"""How long the end of the interpreter waits for gloo's threads.

They need the interpreter once more to let go of the tensors of the last collective. When it is
already ending, Python ends such a thread in the middle of C++ code, which aborts the process.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among all processes.

    Attributes:
        rank: index of this process, from 0.
        size: number of processes.
        local_rank: index among the processes of this host.
        local_size: number of processes on this host.
        device: the device this process computes on.
        backend: name of the communication library: gloo, nccl, ..., or "" for one process.
        hosts: host name of every rank.
        timeout: how long a collective may wait.
        declared: name of every rank's island, where the run declares islands; else empty.
        start: name of this start of the script, of rank 0's clock.
        notes: what each rank has told the others when they joined.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    backend: str = ""
    hosts: tuple[str, ...] = ("localhost",)
    timeout: timedelta = timedelta(minutes=10)
    declared: tuple[str, ...] = ()
    start: str = field(default="", compare=False, repr=False)
    notes: tuple[str, ...] = field(default=("",), compare=False, repr=False)

    @property
    def device_name(self) -> str:
        """The name that the driver gives the device; CPU for the processor."""
        if self.device.type == "cpu":
            return "CPU"
        return str(torch.get_device_module(self.device).get_device_name(self.device))

    @classmethod
    def discover(
        cls,
        *,
        cpu: bool = False,
        backend: str | None = None,
        timeout: timedelta | None = None,
        start_timeout: timedelta | None = None,
        note: str = "",
    ) -> "World":
        """Find this process's place and join the others.

        The place comes from an existing process group, or else from torchrun's variables; without
        both the world is this process alone.

        Args:
            cpu: compute on the CPU even when there is an accelerator.
            backend: communication library; None takes the device's own.
            timeout: how long a collective may wait; None means ten minutes.
            start_timeout: how long this rank waits for the others to join; None takes ``timeout``.
            note: a line that all ranks are told.

        Raises:
            PreflightError: the variables contradict each other, the host has too few accelerators
                for its ranks, or the others cannot be reached.
            UsageError: a process of ``multiprocessing`` is importing the script.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # It has the rank's variables, and would meet the other ranks in the rank's place.
            raise UsageError(
                "expected an Accelerator of the script alone, found one more in a process that "
                "multiprocessing has started, as a loader's worker by spawn: such a process "
                "imports the script; put what trains under if __name__ == '__main__':"
            )
        timeout = timeout or timedelta(minutes=10)
        rank = own_rank()
        size = dist.get_world_size() if dist.is_initialized() else _integer("WORLD_SIZE", 1)
        local_rank = _integer("LOCAL_RANK", 0 if size == 1 else rank)
        local_size = _integer("LOCAL_WORLD_SIZE", 1 if size == 1 else size)
        if not 0 <= rank < size:
            raise PreflightError(
                f"expected 0 <= RANK < WORLD_SIZE, found RANK={rank}, WORLD_SIZE={size}; start the "
                "script with 'drivetrain launch' or torchrun, which set both"
            )
        device = _device_of(local_rank, local_size, cpu)
        if size > 1 and not dist.is_initialized():
            _join(device, backend, start_timeout or timeout)
            set_timeout(timeout)
        if size > 1:
            begin_statuses()
        hosts, starts, notes = _told(size, device, note)
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            device=device,
            backend=str(dist.get_backend()) if dist.is_initialized() and size > 1 else "",
            hosts=hosts,
            timeout=timeout,
            start=starts[0],
            notes=notes,
        )

    @property
    def islands(self) -> tuple[str, ...]:
        """The name of every rank's island: of ranks with quick links among them.

        Hosts, unless the run declares islands (``drivetrain.compression.communicator``).
        """
        return self.declared or self.hosts

    @property
    def island_size(self) -> int:
        """Number of ranks on this rank's island."""
        return self.islands.count(self.islands[self.rank])

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks of other hosts take part, or of other islands where these are declared."""
        return len(set(self.islands)) > 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local_rank == 0


def restarts() -> int:
    """Return how often the launcher has started this run again after a failure."""
    return _integer("TORCHELASTIC_RESTART_COUNT", 0)


def launched_config() -> str:
    """Return the path of the launcher's configuration, "" without a launcher."""
    return os.environ.get(CONFIG_VARIABLE, "")


def is_launched() -> bool:
    """Whether a launcher started this process, and hands a scheduler's notice on to it."""
    return bool(launched_config() or os.environ.get("TORCHELASTIC_RUN_ID"))


def reader_mark(config: Path) -> Path:
    """Return the file by which a rank tells the launcher that the configuration was read."""
    return config.with_suffix(".read")


def host_link() -> float:
    """Return the measured bytes per second between hosts; 0 where nobody has measured them."""
    try:
        return float(os.environ.get(LINK_VARIABLE, "") or 0)
    except ValueError:
        raise PreflightError(
            f"expected bytes per second in the variable {LINK_VARIABLE}, found "
            f"{os.environ[LINK_VARIABLE]!r}; 'drivetrain launch' sets it: leave it unset"
        ) from None


def saved_mark(config: Path, *, memory: bool = False) -> Path:
    """Return the file by which rank 0 tells the launcher how far the newest checkpoint is.

    Args:
        config: the launcher's configuration.
        memory: of the newest checkpoint in memory, not in storage.
    """
    return config.with_suffix(".saved-in-memory" if memory else ".saved")


def memory_folder() -> str:
    """Return the folder that the launcher keeps in this host's memory for checkpoints, or ""."""
    return os.environ.get(MEMORY_VARIABLE, "")


def cache_folder() -> Path:
    """Return this user's folder for files that are made once on a machine.

    Raises:
        RuntimeError: the user has no home.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # to be ignored, by the specification of XDG
        root = Path("~/.cache").expanduser()
    return root / "drivetrain"


def memory_kept_mark(folder: Path) -> Path:
    """Return the file by which a rank asks the launcher to leave the folder in memory at its end.

    Args:
        folder: the place of one Accelerator in the launcher's folder.
    """
    return folder / "kept"


def record_request() -> str:
    """Return the path of the request to record this run, "" without one."""
    return os.environ.get(RECORD_VARIABLE, "")


def work_path() -> str:
    """Return the path of the file in which this rank tells its launcher its times, or ""."""
    return os.environ.get(WORK_VARIABLE, "")


def variables(prefix: str) -> dict[str, str]:
    """Return the variables of another launcher, by their names without the prefix."""
    return {
        name.removeprefix(prefix): value
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }


def loopback_store(timeout: timedelta) -> TCPStore:
    """Start a store on a free port of the loopback interface.

    Processes of one host find each other through it. TCPStore binds to every interface, whatever
    the host, unless a bound socket is handed over.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise PreflightError(
            f"expected an integer in the variable {name}, found {text!r}; "
            "start the script with 'drivetrain launch' or torchrun"
        ) from None


def _device_of(local_rank: int, local_size: int, cpu: bool) -> torch.device:
    """Return the rank's own accelerator, or the CPU."""
    accelerator = None if cpu else torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_size > count:
        raise PreflightError(
            f"expected an accelerator for each of the {local_size} ranks of this host, found "
            f"{count}; start at most {count} ranks per host or compute on the CPU with --cpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def set_timeout(timeout: timedelta) -> None:
    """Let collectives of the default group wait so long from now on.

    torch has one timeout for joining a group and for its collectives.
    """
    dist.distributed_c10d._set_pg_timeout(timeout)


def _join(device: torch.device, backend: str | None, timeout: timedelta) -> None:
    chosen = backend or dist.get_default_backend_for_device(device)
    try:
        store, rank, size = _meeting(timeout)
        dist.init_process_group(
            chosen,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise PreflightError(
            f"cannot join the other ranks at {address} with {chosen}: {error}; check that every "
            "rank was started and that the address and port are free and reachable"
        ) from error
    atexit.register(time.sleep, LAST_WORK_S)


_lives: list[tuple[Store, int, int]] = []
"""Of each time that this process has joined the others: the store where all met, rank and size."""


def _meeting(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store for this life of the process group, with this rank and the number of ranks.

    The store outlives a group: a launcher has it, or whatever holds the group. There a later group
    would find the addresses of an earlier one, which nobody answers. So each life has keys of its
    own, and the store stays until the process ends: others may still ask it when rank 0 has left.
    """
    store, rank, size = _lives[0] if _lives else next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    _lives.append((store, rank, size))
    return PrefixStore(f"drivetrain/life/{len(_lives)}", store), rank, size


def own_rank() -> int:
    """Return this process's rank, also before it has joined the others; 0 without others."""
    return dist.get_rank() if dist.is_initialized() else _integer("RANK", 0)


def has_left() -> bool:
    """Whether this process was among the ranks of its run, and has left them."""
    return bool(_lives) and not dist.is_initialized()


def new_start() -> str:
    """Return the name of a start: later starts have later names."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")


def _told(size: int, device: torch.device, note: str) -> Iterator[tuple[str, ...]]:
    """Return the host, the moment of its start and the note of every rank, in one exchange."""
    mine = "\n".join(
        (f"{os.environ.get('GROUP_RANK', '0')}@{socket.gethostname()}", new_start(), note)
    )
    told = [mine]
    if size > 1:
        carries_cpu = "cpu" in dist.get_backend_config()
        told = gather_texts(mine, size, device=CPU if carries_cpu else device)
    return zip(*(each.split("\n", 2) for each in told), strict=True)


# --- the status of each rank, in the store where the ranks met ---


_SHOWN_CHARACTERS = 200
"""Characters of an exception in a status."""

_meetings: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""How many meetings this process has begun on each of torch's process groups, while they live."""


class CountingThread(threading.Thread):
    """A thread that runs operations of all ranks in one order.

    Attributes:
        place: name of the operations' order, the same on all ranks.
        submitted: how many operations this rank has handed over.
        current: the facts of the operation under way, by name; None between two operations.
    """

    place: str = ""
    submitted: int = 0
    current: Callable[[], Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The status of a rank: its wait for others, or its end.

    Attributes:
        doing: the wait in words, "" for a rank that has ended.
        place: where the rank waits: an order of meetings or operations that ranks share.
        number: which one of that order, from 1.
        ranks: the ranks that the wait needs.
        reached: how many meetings or operations the rank has begun, by place.
        running: the facts of the operations under way, by place.
        site: the line of the script where the rank waits, "" where there is none.
        at: time of the status, in seconds since the epoch.
        error: the exception that ended the rank, "" without one.
    """

    doing: str = ""
    place: str = ""
    number: int = 0
    ranks: Sequence[int] = ()
    reached: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    site: str = ""
    at: float = field(default_factory=time.time)
    error: str = ""

    def lacks(self, place: str, number: int) -> bool:
        """Whether the rank had not begun a meeting or operation when it spoke."""
        return self.reached.get(place, 0) < number

    def __str__(self) -> str:
        ago = f"{max(0.0, time.time() - self.at):.1f} s"
        if self.doing:
            return f"waits in {self.doing}" + (f" at {self.site}" if self.site else "")
        return f"failed {ago} ago with {self.error}" if self.error else f"ended {ago} ago"


def begin_meeting(group: dist.ProcessGroup, order: str = "") -> int:
    """Count a meeting of a group's ranks, and return its number, from 1.

    Args:
        group: of the ranks.
        order: ends the name of the place, where the group's ranks meet in several orders.
    """
    counts = _meetings.setdefault(group, Counter())
    counts[order] += 1
    return counts[order]


def reached() -> dict[str, int]:
    """Return how many meetings and operations this process has begun, by place."""
    groups = [(group, dict(found)) for group, found in list(_meetings.items()) if _is_open(group)]
    counts = {f"{group.group_name}{o}": n for group, found in groups for o, n in found.items()}
    return counts | {thread.place: thread.submitted for thread in _counting_threads()}


def running() -> dict[str, Mapping[str, Any]]:
    """Return the facts of the operations that this process has under way, by place."""
    current = ((thread.place, thread.current) for thread in _counting_threads())
    return {place: facts() for place, facts in current if facts is not None}


def set_status(status: RankStatus | None) -> None:
    """Replace this rank's status; None takes it back. A store that is gone hears nothing."""
    with suppress(RuntimeError, ValueError):
        text = "" if status is None else json.dumps(asdict(status))
        _store().set(_key(dist.get_rank()), text)


def status_of(rank: int) -> RankStatus | None:
    """Return a rank's status, None without one.

    Raises:
        RuntimeError: the store is gone, or this process has left the others.
    """
    store, key = _store(), _key(rank)
    text = store.get(key).decode() if store.check([key]) else ""
    return RankStatus(**json.loads(text)) if text else None


def leave_status() -> None:
    """Leave the status of a rank that ends, with the exception that ended the rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    error = getattr(sys, "last_value", None)  # python, or the launcher, has printed it
    said = "" if error is None else f"{type(error).__name__}: {error}"
    set_status(RankStatus(reached=reached(), error=said[:_SHOWN_CHARACTERS]))


def leave_others() -> None:
    """Leave the process group of the other ranks, which may still wait for this one."""
    leave_status()
    dist.destroy_process_group()


def begin_statuses() -> None:
    """Take back the status of an earlier life of this rank, and promise a farewell at the end."""
    set_status(None)
    atexit.unregister(leave_status)
    atexit.register(leave_status)


def _counting_threads() -> list[CountingThread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, CountingThread)]


def _is_open(group: dist.ProcessGroup) -> bool:
    """Whether a group was not destroyed: torch gives the names of such groups to new ones."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def _store() -> Any:
    try:
        return dist.distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def _key(rank: int) -> str:
    return f"drivetrain/status/{rank}"
