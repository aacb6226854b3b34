"""A launcher's private folders, on a disk and in memory, of which none outlives the launcher long.

A launcher holds a lock on its folders, which the system lets go of however the launcher ends. So
the next launcher of the same user removes what a killed one has left. It also removes a folder that
stayed since ranks could not read a whole checkpoint in it: users may rescue its files until then.
"""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from drivetrain.errors import ConfigError

MEMORY = Path("/dev/shm")  # noqa: S108 - the file system in memory; the folder there is private
IN_MEMORY = "drivetrain-memory-"
"""First part of the names of folders there."""


@contextmanager
def memory_folder(root: Path = MEMORY) -> Iterator[Path]:
    """Context of a new private folder in memory, removed at the end unless ranks ask to keep it.

    Raises:
        ConfigError: there is no such file system, or nothing can be made in it.
    """
    from drivetrain.runtime.world import memory_kept_mark

    def keep(folder: Path) -> bool:
        return memory_kept_mark(folder).exists()

    with ExitStack() as stack:
        try:
            folder = stack.enter_context(_folder(root, IN_MEMORY, keep))
        except OSError as error:
            raise ConfigError(
                f"checkpoint.local: memory needs a file system in memory at {root}, found none "
                f"that can be written: {error.strerror}; mount a tmpfs there, or set "
                "checkpoint.local to none"
            ) from error
        yield folder


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Context of a new private folder for temporary files, which is removed at the end.

    Its name has the host's: hosts may share the folder of temporary files, but not their locks.

    Raises:
        OSError: it cannot be made.
    """
    prefix = f"drivetrain-launch-{socket.gethostname()}-"
    with _folder(Path(tempfile.gettempdir()), prefix) as folder:
        yield folder


@contextmanager
def _folder(
    root: Path, prefix: str, keep: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """Context of a new folder for this user alone, once those of ended launchers are removed."""
    _sweep(root, prefix)
    with ExitStack() as stack:
        folder = _made(root, prefix, stack)
        try:
            yield folder
        finally:
            if not keep(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _made(root: Path, prefix: str, stack: ExitStack) -> Path:
    """Make a folder and lock it, unless another launcher has swept it in between."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            lock = _locked(folder)
        except OSError:  # a file system without locks, where nobody sweeps either
            return folder
        if lock is not None:
            stack.callback(os.close, lock)
            return folder


def _sweep(root: Path, prefix: str) -> None:
    """Remove the folders of launchers that have ended."""
    for folder in root.glob(f"{prefix}*"):
        with suppress(OSError):  # another launcher sweeps, too, or there are no locks
            facts = folder.lstat()
            if facts.st_uid != os.getuid() or folder.is_symlink() or not folder.is_dir():
                continue
            lock = _locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder; None if a launcher has it, or it is gone.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not folder.exists():
            return None
        stack.pop_all()
    return lock
