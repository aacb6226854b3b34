"""How the ranks find each other: a store on loopback on one host, host 0 on several.

torch's own single-host store listens on every interface, and its agent uses one store for all
attempts, so that restarted ranks read the addresses of dead ranks. Here each attempt has a store of
its own; with a single host, no other machine can reach it.
"""

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from drivetrain.config import LaunchConfig
from drivetrain.errors import ConfigError, PreflightError
from drivetrain.runtime.loopback import loopback_store
from drivetrain_launch.ranks.placement import LOOPBACK, Endpoint

LOOPBACK_BACKEND = "drivetrain-loopback"
RUN_ID = "drivetrain"
STORE_TIMEOUT_S = 120
"""How long a host waits for host 0 to answer."""


class LoopbackRendezvous(RendezvousHandler):
    """The only host meets itself: a fresh store for each attempt, listening on loopback alone."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name under which the handler is registered."""
        return LOOPBACK_BACKEND

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


class HostOrderRendezvous(RendezvousHandler):
    """Several hosts meet through torch's c10d rendezvous, and keep the order the user gave them.

    c10d alone orders hosts by address, which would put rank 0, with its files and its output, on
    any of them.
    """

    def __init__(self, inner: RendezvousHandler, node_rank: int, local_address: str) -> None:
        self._inner = inner
        self._node_rank = node_rank
        self._address = local_address

    def get_backend(self) -> str:
        """Return the inner backend's name."""
        return self._inner.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts.

        Raises:
            ConfigError: two hosts were started with the same index.
        """
        info = self._inner.next_rendezvous()
        store = PrefixStore("host-order", info.store)
        if store.add(f"host-{self._node_rank}", 1) > 1:
            raise ConfigError(
                f"launch.node_rank: two hosts were started with --node-rank {self._node_rank}; "
                f"give each of the {info.world_size} hosts its own, from 0"
            )
        bootstrap = RendezvousStoreInfo.build(self._node_rank, store, local_addr=self._address)
        return RendezvousInfo(store, self._node_rank, info.world_size, bootstrap)

    def is_closed(self) -> bool:
        """Whether a host has given up for all."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Tell all hosts that the run is over."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """Return how many hosts wait for the next attempt."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return the identity of the run."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Leave the rendezvous."""
        return self._inner.shutdown()


def rendezvous(launch: LaunchConfig, local_address: str) -> RendezvousHandler:
    """Return the handler for this run's hosts.

    Raises:
        PreflightError: host 0 cannot be reached, or its port cannot be opened.
    """
    parameters = RendezvousParameters(
        backend="c10d" if launch.rdzv_endpoint else LOOPBACK_BACKEND,
        endpoint=launch.rdzv_endpoint,
        run_id=RUN_ID,
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        local_addr=local_address,
        timeout=int(max(1, launch.timeout_s)),
        read_timeout=STORE_TIMEOUT_S,
        is_host=launch.node_rank == 0,
    )
    _register(LOOPBACK_BACKEND, _create_loopback)
    try:
        handler = get_rendezvous_handler(parameters)
    except (RuntimeError, ValueError) as error:
        raise PreflightError(
            f"cannot meet the other hosts at {Endpoint.parse(launch.rdzv_endpoint)}: "
            f"{error.__cause__ or error}; check that host 0 was started with --node-rank 0 and "
            "that the port is open between the hosts"
        ) from error
    if parameters.backend == LOOPBACK_BACKEND:
        return handler
    return HostOrderRendezvous(handler, launch.node_rank, local_address)


def _create_loopback(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(timedelta(seconds=parameters.config["timeout"]))


def _register(backend: str, creator: Callable[[RendezvousParameters], RendezvousHandler]) -> None:
    """Make a backend known to torch; a second registration of the same creator changes nothing."""
    rendezvous_handler_registry.register(backend, creator)
