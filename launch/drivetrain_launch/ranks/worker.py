"""One rank: runs the user's script as ``__main__`` and reports how it ended.

The agent starts ``python -m drivetrain_launch.ranks.worker PARENT [--as-accelerate[=PACKAGE,...]]
(SCRIPT | -m MODULE) [ARGS]``.
This module imports nothing heavy, and not torch: a script without torch must not load torch.
"""

import atexit
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import drivetrain
from drivetrain.compat import importing
from drivetrain.errors import CollectiveError, DrivetrainError
from drivetrain.runtime.board import EarlyNotice, board
from drivetrain_launch.ranks.answers import (
    BOARD_VARIABLE,
    RECORDER_VARIABLE,
    STACK_SIGNAL,
    STACKS,
    answer,
)

INTERRUPTED = 130
LINGER_S = 1.0
"""A rank that lost a peer waits this long before it ends: the peer's own error comes first."""

LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "connectfullmesh failed",
    "socket closed",
    "remote process exited",
    "failed to recv, got 0 bytes",
)
"""Words in the errors of gloo, NCCL and TCPStore when another rank is gone."""

PR_SET_PDEATHSIG = 1

LOGS_VARIABLE = "DRIVETRAIN_KEEPS_LOGS"
"""Environment variable of a rank whose output is kept in files, where its traceback belongs."""

AS_ACCELERATE = "--as-accelerate"
"""First argument of a rank whose script sees drivetrain where it imports ``accelerate``."""


def as_accelerate_words(packages: str | None) -> tuple[str, ...]:
    """Return the first argument of a rank: with names of packages, without any, or none at all."""
    if packages is None:
        return ()
    return (f"{AS_ACCELERATE}={packages}" if packages else AS_ACCELERATE,)


def main() -> None:
    """Run the script named on the command line, and exit as it did."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    die_with(parent)
    faulthandler.enable()
    show_board()
    signal.signal(signal.SIGUSR1, EarlyNotice())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the launcher started it blocked
    atexit.register(leave_process_group)  # now: after all that the script registers
    try:
        code = run(arguments)
    except KeyboardInterrupt:
        atexit.unregister(leave_process_group)
        code = INTERRUPTED
    except SystemExit as error:
        atexit.unregister(leave_process_group)
        code = code_of(error)
    except BaseException as error:
        atexit.unregister(leave_process_group)
        leave(fail(error))
    sys.exit(code)


def show_board() -> None:
    """Show the launcher where this rank is from now on, and answer it with stacks.

    The variable is not for programs that the script starts.
    """
    path = os.environ.pop(BOARD_VARIABLE, "")
    if path:
        board.attach(path)
        stacks = Path(path).with_suffix(STACKS).open("w", encoding="utf-8")
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        if os.environ.get(RECORDER_VARIABLE):
            threading.Thread(target=answer, args=(Path(path), flight), daemon=True).start()


def flight() -> bytes:
    """Return the record of torch's flight recorder as JSON, b"" where there is none."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(
        c10d, "_dump_nccl_trace_json", None
    )
    return bytes(dump()) if dump is not None else b""


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the launcher dies: no rank may outlive it (Linux).

    A rank may have a handler for SIGTERM, or be stopped by SIGSTOP: neither would end it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(128 + signal.SIGKILL)


def run(arguments: list[str]) -> int:
    """Run ``SCRIPT ARGS`` or ``-m MODULE ARGS`` as python itself would.

    Behind ``--as-accelerate`` the script's ``import accelerate`` finds drivetrain.
    """
    option, _, packages = arguments[0].partition("=")
    if option == AS_ACCELERATE:
        importing.run_script(arguments[1:], [name for name in packages.split(",") if name])
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


LAST_WORK_S = 0.05
"""How long the end of a script waits for gloo's threads, as ``World`` does for its own groups."""


def leave_process_group() -> None:
    """Destroy the process group of a script that ended well and left the group open.

    By now python has joined the script's threads, which may have saved a checkpoint, and the
    library has sent its last messages.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        # A group that the script made itself: gloo's threads let go of the last tensors first.
        time.sleep(LAST_WORK_S)


def code_of(error: SystemExit) -> int:
    """Return the exit code that python gives to a SystemExit, printing its message, if any."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def fail(error: BaseException) -> int:
    """Write the error file, print the traceback where it is kept, and return the exit code.

    Without files for logs the launcher alone prints: the traceback of the rank that failed first.
    """
    sys.last_value = error  # as python does for an error that nobody caught
    collateral = lost_peer(error)
    text = "".join(traceback_of(error))
    handed_over = write_error_file(error, text, collateral)
    if collateral:
        time.sleep(LINGER_S)
    if not handed_over or os.environ.get(LOGS_VARIABLE):
        print(text, file=sys.stderr, end="", flush=True)
    return error.exit_code if isinstance(error, DrivetrainError) else 1


def lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone or silent."""
    return any(
        isinstance(link, CollectiveError | ConnectionError)
        or (isinstance(link, RuntimeError) and any(p in str(link).lower() for p in LOST_PEER))
        for link in causes(error)
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def traceback_of(error: BaseException) -> list[str]:
    """Return the lines of an error's traceback, from the script on.

    The message of a CollectiveError says it all: frames of the library behind the script's last
    line, and errors of the backend, are left out.
    """
    frames = script_frames(error.__traceback__)
    if not isinstance(error, CollectiveError):
        # Without a frame of the script it is runpy's; the errors before it say nothing more.
        return traceback.format_exception(type(error), error, frames, chain=frames is not None)
    stack = traceback.extract_tb(frames)
    libraries = tuple(str(Path(module.__file__ or "").parent) for module in (drivetrain, os))
    ours = [i for i, frame in enumerate(stack) if not frame.filename.startswith(libraries)]
    head = ["Traceback (most recent call last):\n"]
    shown = traceback.format_list(stack[: ours[-1] + 1 if ours else None])
    return [*head, *shown, *traceback.format_exception_only(error)]


def script_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this file and of runpy from the top: the user's script comes first.

    None when no frame of the script is left: the script did not compile.
    """
    frozen = ("<frozen runpy>", "<frozen importlib._bootstrap>")
    hidden = (__file__, runpy.__file__, importing.__file__, *frozen)
    kept = frames
    while kept is not None and kept.tb_frame.f_code.co_filename in hidden:
        kept = kept.tb_next
    return kept


def leave(code: int) -> NoReturn:
    """End a failed rank at once.

    The usual end of the interpreter joins threads and destroys process groups that still wait for
    other ranks, which hangs or aborts and would replace the exit code.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_error_file(error: BaseException, text: str, collateral: bool) -> bool:
    """Write an error for the agent, in the form of torch's ``record``, with the exact time.

    Returns whether there is an agent.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    now = time.time()
    details = {
        "py_callstack": text,
        "timestamp": str(int(now)),
        "time": now,
        "collateral": collateral,
    }
    summary = f"{type(error).__name__}: {error}".removesuffix(": ")
    report = {"message": {"message": summary, "extraInfo": details}}
    temporary = Path(f"{path}.{os.getpid()}")
    temporary.write_text(json.dumps(report), encoding="utf-8")
    temporary.replace(path)
    return True


if __name__ == "__main__":
    main()
