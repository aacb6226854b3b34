"""A store that the processes of one host find each other through, and nobody else reaches."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"


def loopback_store(timeout: timedelta) -> TCPStore:
    """Start a store on a free port of the loopback interface.

    TCPStore binds to every interface whatever host it is given; a socket that is already bound is
    the one way to restrict it.
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
