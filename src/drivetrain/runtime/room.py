"""How many bytes this machine has left: in host memory, on a disk, on an accelerator."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

GROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows the limits of control groups."""

MEMBERSHIP = Path("/proc/self/cgroup")
"""The file that names the control groups of this process."""

_KINDS = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("memory.max", "memory.current", "inactive_file"),
}
"""By controller (version 1; version 2 has none): limit, use, and the part of use to give back."""


def host_room() -> int:
    """Return the bytes of host memory that this process may still take.

    The machine has them available, and no control group sets a lower limit.
    """
    return min([psutil.virtual_memory().available, *group_rooms(GROUPS, MEMBERSHIP)])


def disk_room(path: str | Path) -> int:
    """Return the free bytes of the file system that a directory lies on."""
    return shutil.disk_usage(path).free


def device_room(device: torch.device) -> int | None:
    """Return the bytes that this process may still take on an accelerator; None: unknown."""
    if not hasattr(torch.get_device_module(device), "mem_get_info"):
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device)
    return free + reserved - torch.accelerator.memory_allocated(device)


def group_rooms(groups: Path, membership: Path) -> Iterator[int]:
    """Yield the room that the limits of the control groups above this process leave.

    Args:
        groups: the directory of all groups.
        membership: the file with a line ``number:controllers:path`` for each group.
    """
    for controllers, place in _memberships(membership):
        for kind, names in _KINDS.items():
            if kind in controllers:
                root = groups / kind
                inner = root / place
                for directory in (inner, *inner.parents):
                    if directory.is_relative_to(root):
                        yield from _room(directory, *names)


def _memberships(membership: Path) -> Iterator[tuple[list[str], str]]:
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        yield controllers.split(","), place.lstrip("/")


def _room(directory: Path, limit: str, use: str, reclaimable: str) -> Iterator[int]:
    most, taken = _number(directory / limit), _number(directory / use)
    if most is None or taken is None:
        return  # no limit, or a group that cannot be seen from inside of a container
    facts = directory / "memory.stat"
    cached = 0
    for line in facts.read_text().splitlines() if facts.is_file() else []:
        name, _, value = line.partition(" ")
        cached += int(value) if name == reclaimable else 0
    yield max(most - taken + cached, 0)


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None
