"""Runs a command of ``drivetrain`` on a host that another machine reached by ssh.

The agent says that it is there. The order comes as a line of JSON on the input, not in the command
line: words, folder, variables and the secret pass no shell, and no list of processes shows them.
The input stays open as long as the other machine wants the run. A further line is a signal for the
launcher here: a scheduler's notice to the other machine. The end of the input ends the run here.
"""

import json
import os
import signal
import sys
import threading
from typing import IO, Any

from drivetrain.errors import ConfigError
from drivetrain.runtime.notices import EarlyNotice

READY = "drivetrain-host ready"
"""Line of output by which the other machine sees that ssh, Python and the package work here."""

LONGEST_ORDER = 4 << 20
"""Bytes of an order, at most."""

SIGNAL = "signal"
"""Key of the number in a line that is a signal."""


def main() -> None:
    """Read the order and carry it out."""
    signal.signal(signal.SIGUSR1, EarlyNotice())  # until the launcher has its own handlers
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    connection = os.fdopen(os.dup(0), "rb", buffering=0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - ranks read nothing from the connection
        os.dup2(nothing.fileno(), 0)
    print(READY, flush=True)
    line = connection.readline(LONGEST_ORDER)
    if not line:  # another host is not ready: nothing is to be started
        return
    order: dict[str, Any] = json.loads(line)
    threading.Thread(target=_obey, args=(connection,), daemon=True).start()
    from drivetrain_launch.cli import run

    try:
        os.chdir(order["folder"])
    except OSError as error:
        text = f"no folder {order['folder']!r}: {error.strerror}; the hosts need one file system"
        print(f"error: {text}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    os.environ.update(order["variables"])
    sys.exit(run([order["command"], *order["words"]]))


def _obey(connection: IO[bytes]) -> None:
    """Send this launcher the signals that come, and SIGINT when the other machine is gone."""
    while line := connection.readline(LONGEST_ORDER):
        os.kill(os.getpid(), json.loads(line)[SIGNAL])
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
