"""Runs a command of ``drivetrain`` on a host that another machine reached by ssh.

The agent says that it is there. The order comes as a line of JSON on the input, not in the command
line: words, folder, variables and the secret pass no shell, and no list of processes shows them.
The input stays open as long as the other machine wants the run; its end ends the run here.
"""

import json
import os
import signal
import sys
import threading
from typing import IO, Any

from drivetrain.errors import ConfigError

READY = "drivetrain-host ready"
"""Line of output by which the other machine sees that ssh, Python and the package work here."""

LONGEST_ORDER = 4 << 20
"""Bytes of an order, at most."""


def main() -> None:
    """Read the order and carry it out."""
    connection = os.fdopen(os.dup(0), "rb", buffering=0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - ranks read nothing from the connection
        os.dup2(nothing.fileno(), 0)
    print(READY, flush=True)
    line = connection.readline(LONGEST_ORDER)
    if not line:  # another host is not ready: nothing is to be started
        return
    order: dict[str, Any] = json.loads(line)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    from drivetrain_launch.cli import run

    try:
        os.chdir(order["folder"])
    except OSError as error:
        text = f"no folder {order['folder']!r}: {error.strerror}; the hosts need one file system"
        print(f"error: {text}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    os.environ.update(order["variables"])
    sys.exit(run([order["command"], *order["words"]]))


def _end_with(connection: IO[bytes]) -> None:
    """Ask this launcher to end when the other machine, or the connection, is gone."""
    while connection.read(1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
