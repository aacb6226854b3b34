"""Starts a command on all hosts of a list over the system's ssh, and ends all of them.

The hosts come from ``--hosts``, or from a hostfile of DeepSpeed's format. ssh gets a list of
arguments with a fixed command; everything else goes to the host's input, and only when all hosts
are ready. A host that cannot be reached, or lacks the package, is named, and nothing is started
anywhere.

Runs a command of ``drivetrain`` on a host that another machine reached by ssh.

The agent says that it is there. The order comes as a line of JSON on the input, not in the command
line: words, folder, variables and the secret pass no shell, and no list of processes shows them.
The input stays open as long as the other machine wants the run. A further line is a signal for the
launcher here: a scheduler's notice to the other machine. The end of the input ends the run here.
"""

import json
import math
import os
import random
import re
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from drivetrain.errors import CollectiveError, ConfigError, refusing
from drivetrain.runtime.board import NOTICES, EarlyNotice
from drivetrain_launch.console import show
from drivetrain_launch.ranks.channel import SECRET_VARIABLE
from drivetrain_launch.ranks.failure import Signals, Stopped
from drivetrain_launch.ranks.placement import FIRST_PORT, PORTS, Endpoint, ip_version

# --- runs a command of ``drivetrain`` on a host that another machine reached by ssh ---

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


# --- starts a command on all hosts of a list over the system's ssh, and ends all of them ---

_NAME = re.compile(r"(?:([A-Za-z_][A-Za-z0-9._-]{0,31})@)?([A-Za-z0-9][A-Za-z0-9._-]{0,252})")
_LINE = re.compile(r"(\S+)(?:\s+slots=(\d+))?")
_CHOICE = re.compile(r"([^:@\s]+)(?::(\d+(?:,\d+)*))?")


@dataclass(frozen=True, slots=True)
class RemoteHost:
    """A host that the launcher starts.

    Attributes:
        target: ``NAME`` or ``USER@NAME``, as ssh takes it.
        slots: number of ranks; None leaves it to the host.
        devices: indices of the devices that the ranks see; None for all of them.
    """

    target: str
    slots: int | None = None
    devices: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The host without its user."""
        return self.target.rpartition("@")[2]


def read_hosts(text: str) -> list[RemoteHost]:
    """Read ``n1:8,n2:8``; without a number a host chooses itself.

    Raises:
        ConfigError: a host is malformed or there twice.
    """
    hosts = []
    for word in text.split(","):
        target, colon, slots = word.strip().rpartition(":")
        target = target if colon else slots
        hosts.append(_host(target, slots if colon else "", f"--hosts {text}"))
    return _distinct(hosts, f"--hosts {text}")


def read_hostfile(path: Path) -> list[RemoteHost]:
    """Read lines such as ``n1 slots=8``.

    Raises:
        ConfigError: a line is malformed, a host is there twice, or there are none.
    """
    with refusing(f"--hostfile: cannot read {str(path)!r}", "check the path"):
        lines = path.read_text(encoding="utf-8").splitlines()
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None:
            raise ConfigError(f"{path}:{number}: expected 'HOST slots=N', found {words!r}")
        hosts.append(_host(match[1], match[2] or "", f"{path}:{number}"))
    if not hosts:
        raise ConfigError(f"{path}: expected lines such as 'n1 slots=8', found no host")
    return _distinct(hosts, str(path))


def select(
    hosts: Iterable[RemoteHost], include: str | None = None, exclude: str | None = None
) -> list[RemoteHost]:
    """Keep the hosts and devices of ``n1:0,1@n2``, or leave them out.

    Raises:
        ConfigError: both are given, one is malformed, a host is unknown, or nothing is left.
    """
    found = list(hosts)
    if include is not None and exclude is not None:
        raise ConfigError("--include and --exclude: expected one of them, found both")
    text = include if include is not None else exclude
    if text is None:
        return found
    option = "--include" if include is not None else "--exclude"
    chosen = _selection(text, option)
    unknown = [name for name in chosen if name not in {host.name for host in found}]
    if unknown:
        raise ConfigError(
            f"{option}: no host {', '.join(unknown)}; hosts: "
            f"{', '.join(host.name for host in found)}"
        )
    kept = []
    for host in found:
        devices = chosen.get(host.name)
        if devices:
            _check_devices(host, devices)
            slots = range(host.slots or 0)
            left = tuple(each for each in slots if (each in devices) == (include is not None))
            kept.append(replace(host, slots=len(left), devices=left))
        elif (devices is None) == (include is None):  # not left out, or named with all its devices
            kept.append(host)
    kept = [host for host in kept if host.slots != 0]
    if not kept:
        raise ConfigError(f"{option} {text}: no host is left; leave out fewer")
    return kept


def _selection(text: str, option: str) -> dict[str, tuple[int, ...]]:
    chosen: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        match = _CHOICE.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"{option}: expected HOST:0,1@HOST, found {part!r}; without the option all hosts "
                "take part"
            )
        if match[1] in chosen:
            raise ConfigError(f"{option}: {match[1]} is there twice; name each host once")
        devices = match[2].split(",") if match[2] else ()
        chosen[match[1]] = tuple(sorted({int(index) for index in devices}))
    return chosen


def _check_devices(host: RemoteHost, devices: tuple[int, ...]) -> None:
    if host.slots is None or max(devices) >= host.slots:
        raise ConfigError(
            f"device {max(devices)} of {host.name}: expected an index below the host's slots, "
            f"found {host.slots if host.slots is not None else 'no slots'}; give slots=N"
        )


def _host(target: str, slots: str, where: str) -> RemoteHost:
    """Return a host whose name cannot be taken for an option or a command."""
    match = _NAME.fullmatch(target)
    if match is None and ip_version(target) != 6:
        raise ConfigError(
            f"{where}: expected a host such as n1, 10.0.0.1 or user@n1, found {target!r}"
        )
    if slots and (not slots.isdecimal() or int(slots) < 1):
        raise ConfigError(f"{where}: expected a number of ranks from 1, found {slots!r}")
    return RemoteHost(target, int(slots) if slots else None)


def _distinct(hosts: list[RemoteHost], where: str) -> list[RemoteHost]:
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: {', '.join(twice)} is there twice; name each host once")
    return hosts


# --- starting them ---


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
        command = [sys.executable, "-P", "-m", "drivetrain_launch.ranks.remote"]
        if host.target not in ("localhost", "127.0.0.1", socket.gethostname()):
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
            threading.Thread(target=self._read, args=(errors,), daemon=True)
            for errors in (False, True)
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

    def close(self) -> None:
        """Cut the connection if it is still there, and show the last lines."""
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join(1.0)

    def _read(self, errors: bool) -> None:
        for line in (self.process.stderr if errors else self.process.stdout) or ():
            text = line.decode(errors="replace").rstrip(LINE_END)
            if self.ready.is_set():
                show(f"{self.host.name}: {text}", sys.stderr if errors else sys.stdout)
            elif text and errors:
                self._complaints.append(text)
            elif text == READY:
                self.ready.set()


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
            # Who refuses the configuration has started nothing: the others wait for it in vain.
            rest_s = REFUSED_S if code == ConfigError.exit_code else grace_s + END_S
            deadline = min(deadline, time.monotonic() + rest_s)
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


def _end(connections: Sequence[HostConnection], signals: Signals) -> None:
    """End the hosts that still run: a further signal cuts the connections at once."""
    for connection in connections:
        if connection.process.stdin is not None:  # with the end of its input, a launcher ends
            with suppress(OSError):
                connection.process.stdin.close()
    deadline = time.monotonic() + END_S
    signals.take()
    while any(each.runs for each in connections) and time.monotonic() < deadline:
        if any(number != signal.SIGUSR1 for number in signals.take()):
            break
        time.sleep(POLL_S)
    for connection in connections:
        connection.close()


if __name__ == "__main__":
    main()
