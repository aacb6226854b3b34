"""The stacks of a rank that does not go on, and the line of the script among them.

A rank answers a real-time signal with the stacks of its threads, in a file. Python's faulthandler
writes them in the signal handler itself, also while another thread holds the interpreter's lock. A
rank that gives no answer is looked at with py-spy, where that is installed.
"""

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import drivetrain
import drivetrain_launch
from drivetrain_launch.watching.views import state_of, status_of

STACK_SIGNAL = signal.SIGRTMIN + 5
"""The signal that asks a rank for its stacks; scripts hardly use real-time signals."""

BOARD_VARIABLE = "DRIVETRAIN_BOARD"
"""Environment variable of a rank: the file in which it shows where it is."""

STACKS = ".stacks"
"""Suffix of the file of a rank's stacks, beside its board."""

ANSWER_S, LOOK_S = 1.0, 0.02
"""How long a rank may take to write its stacks, and the pause between looks into the file."""

PY_SPY_S = 5.0
LONGEST_STACK = 20_000
"""Characters of stacks that are kept."""

_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_PYTHON = tuple(
    str(Path(sysconfig.get_paths()[name])) for name in ("stdlib", "platstdlib", "purelib")
)
_OURS = tuple(str(Path(each.__file__ or "").parent) for each in (drivetrain, drivetrain_launch))


class Frame(NamedTuple):
    """One call on a stack.

    Attributes:
        file: path of the code.
        line: its line.
        function: its name.
    """

    file: str
    line: int
    function: str

    @property
    def is_script(self) -> bool:
        """Whether the code belongs to the user's script, and not to a library."""
        parts = Path(self.file).parts
        return not (
            self.file.startswith((*_PYTHON, *_OURS, "<"))
            or "site-packages" in parts
            or any(part.startswith("drivetrain_") for part in parts)
        )


def ask(pid: int, path: Path) -> str:
    """Return the stacks of a process's threads, "" where it gives none.

    Args:
        pid: of the rank.
        path: the file that the rank writes its stacks to.
    """
    if state_of(pid):
        return ""
    caught = int(status_of(pid).get("SigCgt", "0"), 16)
    if not caught >> (STACK_SIGNAL - 1) & 1:  # the signal would end the process
        return _seen_from_outside(pid)
    before = _size(path)
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return ""
    deadline, size = time.monotonic() + ANSWER_S, before
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        size, last = _size(path), size
        if size > before and size == last:
            break
    if size == before:
        return _seen_from_outside(pid)
    with path.open("rb") as file:
        file.seek(before)
        return file.read(LONGEST_STACK).decode(errors="replace")


def main_thread(stacks: str) -> Sequence[Frame]:
    """Return the calls of the main thread, the innermost first.

    The main thread is the one that runs the rank's program; without such a thread, the last one.
    """
    threads: list[list[Frame]] = [[]]
    for line in stacks.splitlines():
        if found := _FRAME.match(line):
            threads[-1].append(Frame(found["file"], int(found["line"]), found["function"]))
        elif threads[-1]:
            threads.append([])
    program = str(Path(drivetrain_launch.__file__ or "").parent / "ranks" / "worker.py")
    for frames in threads:
        if any(frame.file == program and frame.function == "main" for frame in frames):
            return frames
    return next((frames for frames in reversed(threads) if frames), [])


def script_site(stacks: str) -> str:
    """Return ``file:line`` where the main thread is in the user's script, "" where unknown."""
    frame = next((frame for frame in main_thread(stacks) if frame.is_script), None)
    return f"{Path(frame.file).name}:{frame.line}" if frame is not None else ""


def _seen_from_outside(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    words = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PY_SPY_S, check=True)  # noqa: S603 - a list of arguments
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout[:LONGEST_STACK]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
