"""Ports for programs that are told one before they listen on it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Context with a port of this machine on which nobody listens.

    A socket stays bound to it, so that the system gives the port to no other process; with
    SO_REUSEADDR, as servers set it too, a program may listen there nevertheless.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
