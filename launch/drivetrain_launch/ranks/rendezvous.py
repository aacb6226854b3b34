"""How the ranks find each other: a store on loopback on one host, host 0 on several.

torch's own single-host store listens on every interface, and its agent uses one store for all
attempts, so that restarted ranks read the addresses of dead ranks. Here each attempt has a store of
its own; with a single host, no other machine can reach it. A host that waits for others says so,
and can be stopped at once.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from typing_extensions import override

from drivetrain.config import LaunchConfig
from drivetrain.errors import ConfigError, PreflightError
from drivetrain.runtime.world import loopback_store
from drivetrain_launch.ranks.placement import LOOPBACK, Endpoint

RUN_ID = "drivetrain"
FIRST_REMINDER_S = 3.0
"""How long a host waits before it says so; the pauses between further lines double."""

LONGEST_PAUSE_S = 60.0
POLL_S = 0.05
LAST_HOST_S = 30.0
"""How long hosts that have found each other may take to compare their indices."""

T = TypeVar("T")


class LoopbackRendezvous(RendezvousHandler):
    """The only host meets itself: a fresh store for each attempt, listening on loopback alone."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return a name for the agent's log."""
        return "drivetrain-loopback"

    @property
    def use_agent_store(self) -> bool:
        """The ranks connect to this store instead of rank 0 starting one on all interfaces."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Start the store of a new attempt."""
        self._store = loopback_store(self._timeout)
        bootstrap = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(RUN_ID, self._store), 0, 1, bootstrap)

    def is_closed(self) -> bool:
        """Return False: one host can always meet itself."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else would hear of it."""

    def num_nodes_waiting(self) -> int:
        """Return 0: there are no other hosts."""
        return 0

    def get_run_id(self) -> str:
        """Return the identity of the run."""
        return RUN_ID

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


class HostOrderRendezvous(DynamicRendezvousHandler):
    """Several hosts meet through torch's c10d rendezvous, and keep the order the user gave them.

    c10d alone orders hosts by address, which would put rank 0, with its files and its output, on
    any of them.
    """

    _launch: LaunchConfig
    _address: str

    @classmethod
    def meet(cls, launch: LaunchConfig, address: str) -> "HostOrderRendezvous":
        """Reach the store of host 0, or open it there; the address is for the other hosts.

        Host 0 may come later: a host waits for the store as long as it waits for other hosts.
        """
        limit_s = int(max(1, launch.timeout_s))
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=launch.rdzv_endpoint,
            run_id=RUN_ID,
            min_nodes=launch.nnodes,
            max_nodes=launch.nnodes,
            timeout=limit_s,
            read_timeout=limit_s,
            is_host=launch.node_rank == 0,
        )
        with reminding(lambda: f"host 0 of {launch.nnodes} at {launch.rdzv_endpoint}"):
            backend, store = _stoppable(lambda: create_backend(parameters))
        hosts = launch.nnodes
        handler: HostOrderRendezvous = cls.from_backend(
            RUN_ID, store, backend, hosts, hosts, local_addr=address
        )
        handler._launch, handler._address = launch, address
        return handler

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts.

        Raises:
            ConfigError: several hosts were started with the same index; every host raises it.
            PreflightError: a host left while the indices were compared.
        """
        with reminding(self._missing):
            info = super().next_rendezvous()
        store, index = PrefixStore("host-order", info.store), self._launch.node_rank
        self._check_order(store, info.world_size)
        bootstrap = RendezvousStoreInfo.build(index, store, local_addr=self._address)
        return RendezvousInfo(store, index, info.world_size, bootstrap)

    def _missing(self) -> str:
        hosts = self._launch.nnodes
        known = len(self._state_holder.state.participants)
        missing = hosts - max(known, 1)  # this host is there before the store says so
        return f"{missing} of {hosts} hosts at {self._launch.rdzv_endpoint}" if missing else ""

    def _check_order(self, store: PrefixStore, hosts: int) -> None:
        store.add(f"host-{self._launch.node_rank}", 1)
        _arrive(store, "counted", hosts)
        counts = [store.add(f"host-{index}", 0) for index in range(hosts)]
        # The host that serves the store must not end before the others have read it. A host that
        # finds the store gone has read before.
        with suppress(RuntimeError):
            _arrive(store, "read", hosts)
        for index, count in enumerate(counts):
            if count > 1:
                raise ConfigError(
                    f"launch.node_rank: {count} hosts were started with --node-rank {index}; give "
                    f"each of the {hosts} hosts its own, from 0 to {hosts - 1}"
                )


@contextmanager
def reminding(missing: Callable[[], str]) -> Iterator[None]:
    """Say on the error stream now and then for whom the block waits, if for any, and how long."""
    over, begin = threading.Event(), time.monotonic()

    def remind() -> None:
        pause = FIRST_REMINDER_S
        while not over.wait(pause):
            waited = time.monotonic() - begin
            if whom := missing():
                print(f"waiting for {whom} ({waited:.0f} s)", file=sys.stderr, flush=True)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _stoppable(call: Callable[[], T]) -> T:
    """Return the result of a call that waits outside of Python, where no signal ends the wait."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()


def _arrive(store: PrefixStore, place: str, hosts: int) -> None:
    """Wait until every host has come to a place.

    Raises:
        PreflightError: a host has not.
    """
    deadline, here = time.monotonic() + LAST_HOST_S, store.add(place, 1)
    while here < hosts:
        if time.monotonic() > deadline:
            raise PreflightError(
                f"{hosts - here} of {hosts} hosts left while the hosts met; see their output"
            )
        time.sleep(POLL_S)
        here = store.add(place, 0)


def rendezvous(launch: LaunchConfig, local_address: str) -> RendezvousHandler:
    """Return the handler for this run's hosts.

    Raises:
        PreflightError: host 0 cannot be reached, or its port cannot be opened.
    """
    if not launch.rdzv_endpoint:
        return LoopbackRendezvous(timedelta(seconds=int(max(1, launch.timeout_s))))
    try:
        return HostOrderRendezvous.meet(launch, local_address)
    except (RuntimeError, ValueError) as error:
        raise PreflightError(
            f"cannot meet the other hosts at {Endpoint.parse(launch.rdzv_endpoint)}: "
            f"{error.__cause__ or error}; check that host 0 was started with --node-rank 0 and "
            "that the port is open between the hosts"
        ) from error
