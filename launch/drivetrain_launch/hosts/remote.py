"""Starts a command on all hosts of a list over the system's ssh, and ends all of them.

ssh gets a list of arguments with a fixed command; everything else goes to the host's input, and
only when all hosts are ready. A host that cannot be reached, or lacks the package, is named, and
nothing is started anywhere.
"""

import json
import math
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.errors import CollectiveError, ConfigError
from drivetrain.runtime.notices import NOTICES
from drivetrain_launch.console import show
from drivetrain_launch.hosts.agent import READY, SIGNAL
from drivetrain_launch.hosts.hostfile import RemoteHost
from drivetrain_launch.hosts.surroundings import FIRST_PORT, PORTS
from drivetrain_launch.ranks.channel import SECRET_VARIABLE
from drivetrain_launch.ranks.placement import Endpoint
from drivetrain_launch.ranks.signals import Signals, Stopped

EXPORTED = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "PYTHONPATH", "HF_HOME", "DRIVETRAIN_")
"""Beginnings of the names of variables that every host gets; tokens and passwords are not among
them."""

CONNECT_S = 8
"""How long ssh tries to reach a host."""

ALIVE = ("ServerAliveInterval=3", "ServerAliveCountMax=3")
"""ssh ends a connection over which nothing comes for 9 seconds."""

LOST = 255
"""Exit code of ssh without a connection."""

READY_S = 30.0
"""How long a host may take from the login to Python."""

LAST_LINES = 3
"""Lines of a host's error stream that an error quotes."""

END_S = 20.0
"""How long hosts have to end by themselves, besides the time in which their ranks may save."""

REFUSED_S = 1.0
"""How long hosts have to hear from each other that one of them refused the configuration."""

POLL_S = 0.05
LINE_END = "\r\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteJob:
    """The run that all hosts start.

    Attributes:
        hosts: the first one is host 0.
        words: of the command, without those about hosts: options, script, arguments.
        grace_s: how long ranks have to save after SIGTERM.
        endpoint: where they meet; "" lets host 0's name and a random port decide.
        command: of ``drivetrain``.
        variables: environment variables for every host, besides ``EXPORTED``.
    """

    hosts: Sequence[RemoteHost]
    words: Sequence[str]
    grace_s: float
    endpoint: str = ""
    command: str = "launch"
    variables: Mapping[str, str] = field(default_factory=dict)


def run_hosts(job: RemoteJob) -> int:
    """Start the run on every host, and return the exit code when it is over everywhere.

    Raises:
        CollectiveError: the connection to a host was lost during the run.
        ConfigError: a host cannot be reached, or lacks the package, or there is no ssh here;
            nothing was started.
    """
    endpoint = job.endpoint or str(
        Endpoint(address_of(job.hosts[0]), FIRST_PORT + random.SystemRandom().randrange(PORTS))
    )
    started: list[HostConnection] = []
    with Signals() as signals:
        try:
            signals.record(True)
            started.extend(HostConnection(host) for host in job.hosts)
            _wait_until_ready(started, signals)
            for connection, order in zip(started, _orders(job, endpoint), strict=True):
                connection.send(order)
            return _wait(started, signals, job.grace_s)
        except Stopped as stopped:
            return stopped.code
        finally:
            _end(started, signals)


def _orders(job: RemoteJob, endpoint: str) -> Iterator[Mapping[str, object]]:
    """Yield the order of each host."""
    common = {name: text for name, text in os.environ.items() if name.startswith(EXPORTED)}
    common |= job.variables
    common.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    for index, host in enumerate(job.hosts):
        place = ["--nnodes", str(len(job.hosts)), "--node-rank", str(index)]
        place += ["--rdzv-endpoint", endpoint]
        place += ["--nproc-per-node", str(host.slots)] if host.slots else []
        shown = ",".join(map(str, host.devices)) if host.devices else ""
        yield {
            "command": job.command,
            "words": [*place, *job.words],
            "folder": str(Path.cwd()),
            "variables": common | ({"CUDA_VISIBLE_DEVICES": shown} if shown else {}),
        }


def address_of(host: RemoteHost) -> str:
    """Return a host's address, which the configuration of ssh may hold under another name.

    Raises:
        ConfigError: there is no ssh here.
    """
    done = subprocess.run(  # noqa: S603 - a list of arguments; the name has been checked
        [_ssh(), "-G", "--", host.target],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return next((value for key, _, value in lines if key == "hostname"), host.name)


def _ssh() -> str:
    """Return the path of the system's ssh.

    Raises:
        ConfigError: there is none.
    """
    found = shutil.which("ssh")
    if found is None:
        raise ConfigError(
            "--hosts and --hostfile start the hosts over ssh, and found no program 'ssh' on the "
            "path; install an ssh client, or type the command on each host with --nnodes, "
            "--node-rank and --rdzv-endpoint"
        )
    return found


class HostConnection:
    """The agent of one host, over ssh; on this machine, without ssh.

    Its output is shown from the moment on at which the agent is ready. Greetings of the host's
    shell come before, and complaints of ssh, of which an error quotes the last.

    Args:
        host: the host.

    Raises:
        ConfigError: there is no ssh here.
    """

    def __init__(self, host: RemoteHost) -> None:
        self.host = host
        self.ready = threading.Event()
        self._complaints: deque[str] = deque(maxlen=LAST_LINES)
        command = [sys.executable, "-P", "-m", "drivetrain_launch.hosts.agent"]
        if not _is_here(host):
            remote = " ".join(shlex.quote(word) for word in command)
            settings = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", *ALIVE)
            options = [word for setting in settings for word in ("-o", setting)]
            command = [_ssh(), "-T", *options, "--", host.target, remote]
        self.process = subprocess.Popen(  # noqa: S603 - a list of arguments, see above
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_output, self._read_errors)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def runs(self) -> bool:
        """Whether the host's launcher, or the connection to it, has not ended."""
        return self.process.poll() is None

    def send(self, line: Mapping[str, object]) -> None:
        """Give the agent its order, or a signal."""
        if self.process.stdin is not None:
            with suppress(OSError):  # of a process that has ended, the exit code tells
                self.process.stdin.write(json.dumps(line).encode() + b"\n")
                self.process.stdin.flush()

    def complaint(self) -> str:
        """Return the last lines of a host that did not become ready."""
        for thread in self._threads:
            thread.join(1.0)
        return "; ".join(self._complaints) or f"exit code {self.process.returncode}"

    def ask_to_end(self) -> None:
        """Close the host's input, with which its launcher ends."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        """Cut the connection if it is still there, and show the last lines."""
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join(1.0)

    def _read_output(self) -> None:
        for line in self.process.stdout or ():
            text = line.decode(errors="replace").rstrip(LINE_END)
            if self.ready.is_set():
                show(f"{self.host.name}: {text}", sys.stdout)
            elif text == READY:
                self.ready.set()

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            text = line.decode(errors="replace").rstrip(LINE_END)
            if self.ready.is_set():
                show(f"{self.host.name}: {text}", sys.stderr)
            elif text:
                self._complaints.append(text)


def _wait_until_ready(connections: Sequence[HostConnection], signals: Signals) -> None:
    """Wait until the agents of all hosts have said that they are there.

    Raises:
        ConfigError: names the hosts that cannot be reached, or lack the package.
        Stopped: a signal came.
    """
    deadline = time.monotonic() + READY_S
    while not all(connection.ready.is_set() for connection in connections):
        late = time.monotonic() > deadline
        failed = [
            connection
            for connection in connections
            if not connection.ready.is_set() and (late or not connection.runs)
        ]
        if failed:
            found = "; ".join(
                f"{each.host.name}: {'no answer' if late else each.complaint()}" for each in failed
            )
            raise ConfigError(
                f"cannot start the run on {', '.join(each.host.name for each in failed)}: {found}; "
                f"nothing was started; expected a login by ssh without a password, and "
                f"{sys.executable} with drivetrain, on every host; try 'ssh -o BatchMode=yes "
                f"{failed[0].host.target} {sys.executable} -m drivetrain_launch --version'"
            )
        signals.check()
        time.sleep(POLL_S)


def _wait(connections: Sequence[HostConnection], signals: Signals, grace_s: float) -> int:
    """Wait until all hosts have ended, and return the exit code; pass notices on to them.

    The first host that fails lets the others end with it, and SIGTERM all of them, in their time.

    Raises:
        CollectiveError: the connection to a host was lost.
        Stopped: a signal that is no notice came, or hosts did not end after SIGTERM.
    """
    deadline, code, told = math.inf, 0, 0
    while any(connection.runs for connection in connections):
        for number in signals.take():
            if number not in NOTICES:
                raise Stopped(number)
            for connection in connections:
                connection.send({SIGNAL: number})
            if number == signal.SIGTERM:
                told, deadline = number, min(deadline, time.monotonic() + grace_s + END_S)
        if not code and (code := _first_code(connections)):
            deadline = min(deadline, time.monotonic() + _rest_s(code, grace_s))
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    code = code or _first_code(connections)
    lost = [each.host.name for each in connections if each.process.returncode == LOST]
    if lost:
        raise CollectiveError(
            f"the connection to {', '.join(lost)} is lost, and the run has ended on all hosts; "
            "start it again when ssh reaches them"
        )
    if told and not code:
        raise Stopped(told)
    return code


def _first_code(connections: Sequence[HostConnection]) -> int:
    """Return the exit code of a host that has failed, 0 without any."""
    codes = [connection.process.poll() for connection in connections]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _rest_s(code: int, grace_s: float) -> float:
    """Return how long the others have to end with the first host that failed.

    A host that refuses the configuration has started nothing, and the others wait for it in vain.
    """
    return REFUSED_S if code == ConfigError.exit_code else grace_s + END_S


def _end(connections: Sequence[HostConnection], signals: Signals) -> None:
    """End the hosts that still run: a further signal cuts the connections at once."""
    for connection in connections:
        connection.ask_to_end()
    deadline = time.monotonic() + END_S
    signals.take()
    while any(each.runs for each in connections) and time.monotonic() < deadline:
        if any(number != signal.SIGUSR1 for number in signals.take()):
            break
        time.sleep(POLL_S)
    for connection in connections:
        connection.close()


def _is_here(host: RemoteHost) -> bool:
    return host.target in ("localhost", "127.0.0.1", socket.gethostname())
