"""The hosts of a run: from ``--hosts``, or from a hostfile of DeepSpeed's format."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from drivetrain.errors import ConfigError

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
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--hostfile: cannot read {str(path)!r}: {error}; check the path"
        ) from error
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
    if include is not None:
        return [_with(host, chosen[host.name]) for host in found if host.name in chosen]
    kept = [_without(host, chosen.get(host.name, ()), host.name in chosen) for host in found]
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


def _with(host: RemoteHost, devices: tuple[int, ...]) -> RemoteHost:
    if not devices:
        return host
    _check_devices(host, devices)
    return replace(host, slots=len(devices), devices=devices)


def _without(host: RemoteHost, devices: tuple[int, ...], named: bool) -> RemoteHost:
    if not named:
        return host
    if not devices:
        return replace(host, slots=0)
    _check_devices(host, devices)
    left = tuple(index for index in range(host.slots or 0) if index not in devices)
    return replace(host, slots=len(left), devices=left)


def _check_devices(host: RemoteHost, devices: tuple[int, ...]) -> None:
    if host.slots is None or max(devices) >= host.slots:
        raise ConfigError(
            f"device {max(devices)} of {host.name}: expected an index below the host's slots, "
            f"found {host.slots if host.slots is not None else 'no slots'}; give slots=N"
        )


def _host(target: str, slots: str, where: str) -> RemoteHost:
    """Return a host whose name cannot be taken for an option or a command."""
    match = _NAME.fullmatch(target)
    if match is None and not _is_ipv6(target):
        raise ConfigError(
            f"{where}: expected a host such as n1, 10.0.0.1 or user@n1, found {target!r}"
        )
    if slots and (not slots.isdecimal() or int(slots) < 1):
        raise ConfigError(f"{where}: expected a number of ranks from 1, found {slots!r}")
    return RemoteHost(target, int(slots) if slots else None)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _distinct(hosts: list[RemoteHost], where: str) -> list[RemoteHost]:
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: {', '.join(twice)} is there twice; name each host once")
    return hosts
