"""How the ranks find each other: a store on loopback on one host, host 0 on several.

torch's own single-host store listens on every interface, and its agent uses one store for all
attempts, so that restarted ranks read the addresses of dead ranks. Here each attempt has a store of
its own; with a single host, no other machine can reach it.
"""

from datetime import timedelta

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
STORE_TIMEOUT_S = 120
"""How long a host waits for host 0 to answer."""


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

    _node_rank: int
    _address: str

    @classmethod
    def meet(cls, launch: LaunchConfig, address: str) -> "HostOrderRendezvous":
        """Reach the store of host 0, or open it there; the address is for the other hosts."""
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=launch.rdzv_endpoint,
            run_id=RUN_ID,
            min_nodes=launch.nnodes,
            max_nodes=launch.nnodes,
            timeout=int(max(1, launch.timeout_s)),
            read_timeout=STORE_TIMEOUT_S,
            is_host=launch.node_rank == 0,
        )
        backend, store = create_backend(parameters)
        hosts = launch.nnodes
        handler: HostOrderRendezvous = cls.from_backend(
            RUN_ID, store, backend, hosts, hosts, local_addr=address
        )
        handler._node_rank, handler._address = launch.node_rank, address
        return handler

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts.

        Raises:
            ConfigError: two hosts were started with the same index.
        """
        info = super().next_rendezvous()
        store = PrefixStore("host-order", info.store)
        if store.add(f"host-{self._node_rank}", 1) > 1:
            raise ConfigError(
                f"launch.node_rank: two hosts were started with --node-rank {self._node_rank}; "
                f"give each of the {info.world_size} hosts its own, from 0"
            )
        bootstrap = RendezvousStoreInfo.build(self._node_rank, store, local_addr=self._address)
        return RendezvousInfo(store, self._node_rank, info.world_size, bootstrap)


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
