"""Checks of a store's directory: it is there, writable, on a disk, and has room."""

import os
import shutil
from pathlib import Path

import psutil

from drivetrain.errors import ConfigError, PreflightError, StorageError
from drivetrain.log import get_logger

_IN_MEMORY = ("tmpfs", "ramfs")

_logger = get_logger(__name__)


def check_directory(path: str | Path) -> Path:
    """Return the absolute path of a directory in which files can be made; warn of tmpfs.

    Raises:
        ConfigError: the path is empty.
        PreflightError: there is no such directory, or no file can be made in it.
    """
    if not str(path):
        raise ConfigError(
            "expected the path of a directory on a disk, found none; name one, such as "
            "path: /mnt/nvme"
        )
    directory = Path(path).absolute()
    if not directory.exists():
        raise PreflightError(
            f"{directory}: expected a directory, found nothing; create it or name another path"
        )
    if not directory.is_dir():
        raise PreflightError(
            f"{directory}: expected a directory, found a file; name the directory that holds it"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PreflightError(
            f"{directory}: expected a directory that this user can write to, found one that it "
            "cannot; change its permissions or name another path"
        )
    kind = file_system(directory)
    if kind in _IN_MEMORY:
        _logger.warning_once(
            f"{directory} is a {kind}: what is kept there takes host memory, as the store 'cpu' "
            "does with less work; name a directory on a disk"
        )
    return directory


def file_system(directory: Path) -> str:
    """Return the type of the file system of a directory, such as ``ext4``; "" when unknown."""
    place = directory.resolve()
    # Of two mounts on one point the later hides the earlier.
    mounts = [
        (len(Path(mount.mountpoint).parts), index, mount.fstype)
        for index, mount in enumerate(psutil.disk_partitions(all=True))
        if place.is_relative_to(mount.mountpoint)
    ]
    return max(mounts)[2] if mounts else ""


def check_room(directory: Path, needed: int) -> None:
    """Check that a directory's file system has room for so many bytes.

    Raises:
        StorageError: it has not.
    """
    if needed > shutil.disk_usage(directory).free:
        raise no_room(directory, needed)


def no_room(directory: Path, needed: int) -> StorageError:
    """Return the error for a directory with too little room; it says how much there is."""
    free = shutil.disk_usage(directory).free
    return StorageError(
        f"{directory}: expected {needed:,} free bytes, found {free:,}; make room, name another "
        "path, or keep less there"
    )
