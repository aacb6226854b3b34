"""Hosts on one machine: each with a name, an address and a link of its own, made of namespaces."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

NEEDED = ("ip", "tc", "nsenter", "unshare", "mount")
NETWORK = "10.231.{}.{}"
"""Addresses of the hosts: one network for each set of hosts, so that two sets never meet."""

FIRST_SPAWN_S = 120.0


@dataclass
class Host:
    """One emulated host.

    Attributes:
        name: as ``hostname`` prints it, and as the other hosts resolve it.
        address: of its only link.
        namespace: name of its network namespace.
        holder: the process that keeps its namespaces alive.
    """

    name: str
    address: str
    namespace: str
    holder: subprocess.Popen[bytes]

    def command(self, arguments: Sequence[str], *, folder: Path | str = "/") -> list[str]:
        """Return the command that runs ``arguments`` on the host."""
        inside = ["-t", str(self.holder.pid), "-m", "-u", "-n", f"--wd={folder}"]
        return ["nsenter", *inside, "--", *arguments]

    def start(
        self,
        arguments: Sequence[str],
        *,
        folder: Path | str = "/",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program on the host, in a session of its own; output and errors are one text."""
        return subprocess.Popen(
            self.command(arguments, folder=folder),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        arguments: Sequence[str],
        *,
        folder: Path | str = "/",
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> tuple[int, str]:
        """Run a program on the host; return its exit code, and output and errors as one text."""
        process = self.start(arguments, folder=folder, env=env)
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            pytest.fail(f"{list(arguments)} on {self.name} ran for more than {timeout} s:\n{text}")
        return process.returncode, text

    def processes(self) -> list[int]:
        """Return the processes that run on the host, without those that were there at its start."""
        found = _ran("ip", "netns", "pids", self.namespace).split()
        return [int(pid) for pid in found if int(pid) != self.holder.pid]

    def cut(self) -> None:
        """Take the link down: whoever waits for this host gets no answer, not even a refusal."""
        _ran("ip", "-n", self.namespace, "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Bring the link up again."""
        _ran("ip", "-n", self.namespace, "link", "set", "eth0", "up")

    def limit(self, rate: str) -> None:
        """Change the rate at which the host sends, such as ``100mbit``."""
        shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        _ran("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", "root", *shape)

    def lose(self) -> None:
        """Kill all that runs on the host at one moment, as when its power is gone."""
        self.cut()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class Hosts:
    """A set of hosts on one bridge.

    Attributes:
        folder: for the files of the set.
        count: how many hosts.
        rate: at which each host sends.
        setup: shell commands for each host, which gets its name as ``$1``; they run as its root
            before any program, in its own mount namespace.
    """

    folder: Path
    count: int = 2
    rate: str = "1gbit"
    setup: str = ""
    hosts: list[Host] = field(default_factory=list)
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex[:6])

    def __enter__(self) -> "Hosts":
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    @property
    def names(self) -> list[str]:
        """The names of the hosts."""
        return [f"n{number}" for number in range(1, self.count + 1)]

    def addresses(self) -> dict[str, str]:
        """Return the address of each host by its name."""
        network = int(self._mark, 16) % 250
        return {
            name: NETWORK.format(network, number) for number, name in enumerate(self.names, start=1)
        }

    def close(self) -> None:
        """Kill all that runs on the hosts, and take the hosts away."""
        for host in self.hosts:
            for pid in _ran("ip", "netns", "pids", host.namespace, check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            host.holder.wait()
            _ran("ip", "netns", "del", host.namespace, check=False)
        self.hosts.clear()
        _ran("ip", "link", "del", self._bridge, check=False)

    @property
    def _bridge(self) -> str:
        return f"br{self._mark}"

    def _make(self) -> None:
        lines = [f"{address} {name}" for name, address in self.addresses().items()]
        known = self.folder / "hosts"
        known.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        _ran("ip", "link", "add", self._bridge, "type", "bridge")
        _ran("ip", "link", "set", self._bridge, "up")
        for number, (name, address) in enumerate(self.addresses().items(), start=1):
            namespace = f"{self._mark}n{number}"
            self._connect(namespace, f"v{self._mark}{number}", address)
            holder = self._hold(name, namespace, known)
            self.hosts.append(Host(name, address, namespace, holder))
            self.hosts[-1].limit(self.rate)

    def _connect(self, namespace: str, link: str, address: str) -> None:
        _ran("ip", "netns", "add", namespace)
        peer = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ran("ip", "link", "add", link, *peer)
        _ran("ip", "link", "set", link, "master", self._bridge, "up")
        _ran("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ran("ip", "-n", namespace, "link", "set", device, "up")

    def _hold(self, name: str, namespace: str, known: Path) -> subprocess.Popen[bytes]:
        """Start the process that keeps a host's namespaces, and wait for the host to be set up."""
        ready = self.folder / f"{name}.ready"
        log = self.folder / f"{name}.log"
        script = (
            'set -e; mount --bind "$2" /etc/hosts; hostname "$1"\n'
            f'{self.setup}\ntouch "$3"; exec sleep infinity'
        )
        # Not "ip netns exec": it mounts /sys anew without control groups, which daemons look for.
        with log.open("wb") as output:
            holder = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{namespace}"),
                    *("unshare", "-m", "-u", "--propagation", "private"),
                    *("bash", "-c", script, "host", name, str(known), str(ready)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        end = time.monotonic() + FIRST_SPAWN_S
        while not ready.exists():
            if holder.poll() is not None or time.monotonic() > end:
                holder.kill()
                raise RuntimeError(f"host {name} could not be set up:\n{log.read_text()}")
            time.sleep(0.02)
        return holder


def why_not() -> str:
    """Return the reason why no hosts can be made here; "" if they can."""
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"hosts of namespaces need {', '.join(missing)}"
    name = f"probe{uuid.uuid4().hex[:6]}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.decode().strip()}"
    _ran("ip", "netns", "del", name)
    return ""


def _ran(*command: str, check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout
