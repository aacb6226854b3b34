"""Starts ``drivetrain launch`` on all hosts of a list over the system's ssh, and ends all of them.

ssh gets a list of arguments with a fixed command; everything else goes to the host's input. A host
that cannot be reached is named, and the others end.
"""

import json
import os
import random
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from drivetrain.errors import PreflightError
from drivetrain_launch.hosts.hostfile import RemoteHost
from drivetrain_launch.hosts.surroundings import FIRST_PORT, PORTS
from drivetrain_launch.ranks.placement import Endpoint
from drivetrain_launch.ranks.secret import SECRET_VARIABLE
from drivetrain_launch.ranks.signals import ENDING, Signals, Stopped

EXPORTED = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "PYTHONPATH", "HF_HOME", "DRIVETRAIN_")
"""Beginnings of the names of variables that every host gets; tokens and passwords are not among
them."""

CONNECT_S = 8
"""How long ssh tries to reach a host."""

ALIVE = ("ServerAliveInterval=3", "ServerAliveCountMax=3")
"""ssh ends a connection over which nothing comes for 9 seconds."""

UNREACHED = 255
"""Exit code of ssh when there is no connection."""

END_S = 45.0
"""How long hosts have to end by themselves: longer than a rank has to save."""

POLL_S = 0.05
LINE_END = "\r\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteJob:
    """The run that all hosts start.

    Attributes:
        hosts: the first one is host 0.
        words: of ``drivetrain launch``, without those about hosts: options, script, arguments.
        endpoint: where they meet; "" lets host 0's name and a random port decide.
    """

    hosts: Sequence[RemoteHost]
    words: Sequence[str]
    endpoint: str = ""


def run_hosts(job: RemoteJob) -> int:
    """Start the run on every host, and return the exit code when it is over everywhere.

    Raises:
        PreflightError: a host cannot be reached.
    """
    endpoint = job.endpoint or str(
        Endpoint(address_of(job.hosts[0]), FIRST_PORT + random.SystemRandom().randrange(PORTS))
    )
    common = {name: text for name, text in os.environ.items() if name.startswith(EXPORTED)}
    common.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    started: list[HostConnection] = []
    with Signals() as signals:
        try:
            signals.record(True)
            for index, host in enumerate(job.hosts):
                place = ["--nnodes", str(len(job.hosts)), "--node-rank", str(index)]
                place += ["--rdzv-endpoint", endpoint]
                place += ["--nproc-per-node", str(host.slots)] if host.slots else []
                shown = ",".join(map(str, host.devices)) if host.devices else ""
                variables = common | ({"CUDA_VISIBLE_DEVICES": shown} if shown else {})
                order = {"folder": str(Path.cwd()), "variables": variables}
                started.append(HostConnection(host, order | {"words": [*place, *job.words]}))
            return _wait(started, signals)
        except Stopped as stopped:
            return stopped.code
        finally:
            for connection in started:
                connection.ask_to_end()
            for connection in started:
                connection.wait()


def address_of(host: RemoteHost) -> str:
    """Return a host's address, which the configuration of ssh may hold under another name."""
    done = subprocess.run(  # noqa: S603 - a list of arguments; the name has been checked
        ["ssh", "-G", "--", host.target],  # noqa: S607 - the system's ssh
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return next((value for key, _, value in lines if key == "hostname"), host.name)


class HostConnection:
    """The launcher of one host, over ssh; on this machine, without ssh.

    Args:
        host: the host.
        order: for ``drivetrain_launch.hosts.agent``.
    """

    def __init__(self, host: RemoteHost, order: Mapping[str, object]) -> None:
        self.host = host
        command = [sys.executable, "-P", "-m", "drivetrain_launch.hosts.agent"]
        if not _is_here(host):
            remote = " ".join(shlex.quote(word) for word in command)
            settings = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", *ALIVE)
            options = [word for setting in settings for word in ("-o", setting)]
            command = ["ssh", "-T", *options, "--", host.target, remote]
        self.process = subprocess.Popen(  # noqa: S603 - a list of arguments, see above
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=_show, args=(host.name, stream, console), daemon=True)
            for stream, console in (
                (self.process.stdout, sys.stdout),
                (self.process.stderr, sys.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()
        self._write(json.dumps(order) + "\n")

    def ask_to_end(self) -> None:
        """Close the host's input, with which its launcher ends."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def wait(self) -> None:
        """Wait until the host's launcher has ended."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread in self._threads:
            thread.join(1.0)

    def _write(self, text: str) -> None:
        if self.process.stdin is not None:
            with suppress(OSError):  # of a process that has ended, the exit code tells
                self.process.stdin.write(text.encode())
                self.process.stdin.flush()


def _wait(connections: Sequence[HostConnection], signals: Signals) -> int:
    """Wait until all hosts have ended, or one was not reached, or a signal came."""
    while True:
        codes = [connection.process.poll() for connection in connections]
        for connection, code in zip(connections, codes, strict=True):
            if code in (UNREACHED, 126, 127):
                raise PreflightError(
                    f"cannot start the run on {connection.host.name}: ssh ended with exit code "
                    f"{code}; its words stand above; expected a login without a password and "
                    f"{sys.executable} with drivetrain on every host"
                )
        for number in signals.take():
            if number in ENDING:
                raise Stopped(number)
        ended = [code for code in codes if code is not None]
        if len(ended) == len(codes):
            return next((code if code > 0 else 1 for code in ended if code), 0)
        if any(ended):
            return _last(connections, next(code for code in ended if code))
        time.sleep(POLL_S)


def _last(connections: Sequence[HostConnection], code: int) -> int:
    """Give the other hosts a moment to end with the first that failed, and return its code."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        if all(connection.process.poll() is not None for connection in connections):
            break
        time.sleep(POLL_S)
    return code if code > 0 else 128 + signal.SIGKILL


def _is_here(host: RemoteHost) -> bool:
    return host.target in ("localhost", "127.0.0.1", socket.gethostname())


def _show(name: str, stream: IO[bytes] | None, console: IO[str]) -> None:
    """Copy the lines of a host, its name in front."""
    for line in stream or ():
        console.write(f"{name}: {line.decode(errors='replace').rstrip(LINE_END)}\n")
        console.flush()
