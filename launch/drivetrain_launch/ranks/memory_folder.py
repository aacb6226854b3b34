"""The launcher's folder in the host's memory: checkpoints there outlive ranks, not the launcher.

A launcher holds a lock on its folder, which the system lets go of however the launcher ends. So the
next launcher of the same user removes what a killed one has left. It also removes a folder that
stayed since ranks could not read a whole checkpoint in it: users may rescue its files until then.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain.errors import ConfigError

MEMORY = Path("/dev/shm")  # noqa: S108 - the file system in memory; the folder there is private
PREFIX = "drivetrain-memory-"


@contextmanager
def memory_folder(root: Path = MEMORY) -> Iterator[Path]:
    """Context of a new private folder in memory, removed at the end unless ranks ask to keep it.

    Raises:
        ConfigError: there is no such file system, or nothing can be made in it.
    """
    from drivetrain.runtime.world import memory_kept_mark

    try:
        _sweep(root)
        folder, lock = _made(root)
    except OSError as error:
        raise ConfigError(
            f"checkpoint.local: memory needs a file system in memory at {root}, found none that "
            f"can be written: {error.strerror}; mount a tmpfs there, or set checkpoint.local to "
            "none"
        ) from error
    try:
        yield folder
    finally:
        if not memory_kept_mark(folder).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made(root: Path) -> tuple[Path, int]:
    """Make a folder and lock it, unless another launcher has swept it in between."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        lock = _locked(folder)
        if lock is not None:
            return folder, lock


def _sweep(root: Path) -> None:
    """Remove the folders of launchers that have ended."""
    for folder in root.glob(f"{PREFIX}*"):
        facts = folder.lstat()
        if facts.st_uid != os.getuid() or folder.is_symlink() or not folder.is_dir():
            continue
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder; None if a launcher has it, or it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None
