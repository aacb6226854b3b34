"""This process's TCP connections as the kernel sees them: bytes sent, and cutting them.

Bytes are counted per connection (``TCP_INFO``) and not per interface, so that other programs on
the machine do not show up in the count.
"""

import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_OFFSET = 200  # of bytes_sent and bytes_retrans in struct tcp_info, 64 bits each, Linux >= 4.19
_SIZE = _OFFSET + 16


def is_supported() -> bool:
    """Whether the kernel counts bytes per connection."""
    if not sys.platform.startswith("linux"):
        return False
    with socket.socket() as probe:
        return len(probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)) == _SIZE


def sent_bytes() -> dict[int, int]:
    """Return the payload bytes sent on each open connection, repetitions left out, by inode."""
    counts = {}
    for each in _connections():
        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        sent, again = struct.unpack_from("=QQ", info, _OFFSET)
        counts[os.fstat(each.fileno()).st_ino] = sent - again
    return counts


def sent_since(before: Mapping[int, int]) -> int:
    """Return the bytes sent since a count, on the connections that are still open."""
    return sum(count - before.get(inode, 0) for inode, count in sent_bytes().items())


def cut_connections() -> None:
    """Shut every connection down: the other ranks see the same when a process ends."""
    for each in _connections():
        # gloo aborts the process when the socket it listens on is shut down.
        if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with suppress(OSError):  # the other end was faster
                each.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[socket.socket]:
    """Yield a copy of each TCP socket of this process, open while it is looked at."""
    for entry in list(_DESCRIPTORS.iterdir()):
        copy = _socket_copy(int(entry.name))
        if copy is None:
            continue
        with copy as connection:
            inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if inet and connection.type == socket.SOCK_STREAM:
                yield connection


def _socket_copy(descriptor: int) -> socket.socket | None:
    """Return a copy of a socket; None for other files.

    Threads of torch close sockets at any time, and another file may get the number.
    """
    try:
        copied = os.dup(descriptor)
    except OSError:  # closed since it was listed
        return None
    if stat.S_ISSOCK(os.fstat(copied).st_mode):
        return socket.socket(fileno=copied)
    os.close(copied)
    return None
