"""What the kernel counted on this process's TCP connections: payload bytes sent.

Per connection (``TCP_INFO``) and not per interface, so that other programs on the machine do not
show up in the count.
"""

import os
import socket
import stat
import struct
import sys
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_OFFSET = 200  # of tcpi_bytes_sent in struct tcp_info, a 64-bit count, since Linux 4.19
_SIZE = _OFFSET + 8


def is_supported() -> bool:
    """Whether the kernel counts bytes per connection."""
    if not sys.platform.startswith("linux"):
        return False
    with socket.socket() as probe:
        return len(probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)) == _SIZE


def sent_bytes() -> int:
    """Return the payload bytes sent on the connections that are open now."""
    return sum(_sent(int(entry.name)) for entry in _DESCRIPTORS.iterdir())


def _sent(descriptor: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return 0
            if connection.type != socket.SOCK_STREAM:
                return 0
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return 0  # closed since it was listed
    return int(struct.unpack_from("=Q", info, _OFFSET)[0])
