"""What the tests of a file leave behind: processes, listeners, shared memory, files in the tree."""

import multiprocessing
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SHARED = Path("/dev/shm")

GONE_S = 60.0
"""What is about to end has so long; only a failure takes it."""

SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "torch/_inductor")
"""Parts of the command lines of processes that serve many files, and end with pytest."""


class Remains:
    """Remembers what there is; ``found`` names what is there beside it.

    Args:
        port_of_ranks: returns the port of the store of ``@pytest.mark.ranks``, which lives on.
    """

    def __init__(self, port_of_ranks: Callable[[], int]) -> None:
        self._port_of_ranks = port_of_ranks
        self._before = set(self._present())

    def found(self) -> list[str]:
        """Return what is left, once all that is about to end has ended."""
        end = time.monotonic() + GONE_S
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def _left(self) -> list[str]:
        new = set(self._present()) - self._before
        of_others = {f"{path}" for path in SHARED.iterdir() if f"{path}" in new and _in_use(path)}
        return sorted(new - of_others)

    def _present(self) -> Iterator[str]:
        yield from _processes()
        for each in psutil.Process().net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port != self._port_of_ranks():
                yield f"a listener on {each.laddr.ip}:{each.laddr.port}"
        # A semaphore of multiprocessing is known by name while it lives, whoever has made it.
        yield from (str(path) for path in SHARED.iterdir() if not path.name.startswith("sem.mp-"))
        untracked = ["git", "ls-files", "--others", "--exclude-standard"]
        done = subprocess.run(untracked, cwd=ROOT, capture_output=True, text=True, check=False)
        yield from (f"the file {name}" for name in done.stdout.splitlines())


def _processes() -> Iterator[str]:
    """Yield all below this process that run, but for the ranks of tests and servers."""
    me = psutil.Process()
    ours = multiprocessing.active_children()
    ranks = {each.pid for each in ours if re.fullmatch(r"rank\d+", each.name)}
    for process in me.children(recursive=True):
        try:
            words = " ".join(process.cmdline())
            runs = process.status() != psutil.STATUS_ZOMBIE
            # A copy of a server, which a program under test is, has the server's words.
            serves = any(each in words for each in SERVERS)
            serves &= "forkserver" not in words or process.ppid() in {me.pid, *ranks}
        except psutil.Error:
            continue
        if runs and not serves and process.pid not in ranks:
            yield f"process {process.pid}: {words}"


def _in_use(path: Path) -> bool:
    """Whether a process below another one than this, such as another run of tests, uses a file."""
    me = psutil.Process()
    ours = {process.pid for process in (me, *me.children(recursive=True))}
    return any(_uses(pid, path) for pid in psutil.pids() if pid not in ours)


def _uses(pid: int, path: Path) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        if str(path) in (process / "maps").read_text():
            return True
        return any(str(path) in str(link.readlink()) for link in (process / "fd").iterdir())
    except OSError:  # it has ended, or is another user's
        return False
