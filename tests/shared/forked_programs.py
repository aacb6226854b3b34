"""Runs Python programs, also launched ones, as copies of one process that has imported torch.

An import of torch takes seconds, and a launch needs one in the launcher and in each rank. Here all
of them are copies of a server, in which torch is imported. This is for tests of what programs do;
where it matters how a process begins, ``tests/launch/conftest.py`` starts new interpreters.
"""

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from waits import PATIENCE_S

ROOT = Path(__file__).parents[2]

SERVER = multiprocessing.get_context("forkserver")

CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_python(
    *arguments: str, folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in a folder, on the CPU with one thread.

    Args:
        arguments: ``PROGRAM ...`` or ``-m MODULE ...``, as on the command line.
        folder: the working directory.
        env: variables beside those of this process.
    """
    with Started(*arguments, folder=folder, env=env) as process:
        return process.wait()


class Started:
    """A program that runs beside the test, begun as ``run_python`` does; a context that ends it.

    Args:
        arguments: ``PROGRAM ...`` or ``-m MODULE ...``, as on the command line.
        folder: the working directory.
        env: variables beside those of this process.
        namespaces: files of namespaces to run in, such as ``/run/netns/NAME``.
    """

    def __init__(
        self,
        *arguments: str,
        folder: Path,
        env: Mapping[str, str] | None = None,
        namespaces: Sequence[str] = (),
    ) -> None:
        self._arguments = arguments
        self._kept = tempfile.TemporaryDirectory()
        self._outputs = [str(Path(self._kept.name, name)) for name in ("stdout", "stderr")]
        variables = {**os.environ, **CPU, **(env or {})}
        given = (arguments, str(folder), variables, self._outputs, namespaces)
        self._process = SERVER.Process(target=_be, args=given)
        self._process.start()
        self.pid = self._process.pid

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
        self._kept.cleanup()

    def said(self) -> str:
        """Return the error stream so far."""
        return _text(self._outputs[1]) if Path(self._outputs[1]).exists() else ""

    def wait(self, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Return exit code and texts at the end of the program; kills it after the timeout."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
            raise subprocess.TimeoutExpired(self._arguments, timeout, *map(_text, self._outputs))
        texts = map(_text, self._outputs)
        return subprocess.CompletedProcess(self._arguments, self._process.exitcode, *texts)


def launch(
    *arguments: str, folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``drivetrain launch`` with these arguments, as ``run_python`` does."""
    words = ("-m", "drivetrain_launch", "launch", *arguments)
    return run_python(*words, folder=folder, env=env)


def _text(path: str) -> str:
    return Path(path).read_text()


def _be(
    arguments: Sequence[str],
    folder: str,
    env: Mapping[str, str],
    outputs: Sequence[str],
    namespaces: Sequence[str],
) -> NoReturn:
    """Become a program."""
    from drivetrain_launch import verification
    from drivetrain_launch.ranks import engine as processes

    for namespace in namespaces:
        _enter(namespace)
    os.chdir(folder)
    given = env.get("PYTHONPATH", "").split(os.pathsep)
    tests = tuple(str(ROOT / name) for name in ("tests", "benchmarks", "docs"))
    sys.path[:] = [*filter(None, given), *(p for p in sys.path if p and not p.startswith(tests))]
    processes.Popen = Copy
    verification.subprocess = SimpleNamespace(Popen=Copy, TimeoutExpired=subprocess.TimeoutExpired)
    with Path(outputs[0]).open("w") as stdout, Path(outputs[1]).open("w") as stderr:
        _begin(env, stdout, stderr)
    _end(arguments)


def _enter(namespace: str) -> None:
    with Path(namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)


class Copy:
    """A launcher or a rank that is a copy of the process that starts it: a ``Popen``, in part."""

    def __init__(self, args, env, stdout=None, stderr=None, start_new_session=False):
        sys.stdout.flush()
        sys.stderr.flush()
        self.args = args
        self.returncode = None
        self.pid = os.fork()
        if not self.pid:
            _begin(env, stdout, stderr)
            _end(args[next(i for i, word in enumerate(args) if i and _begins(word)) :])

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.wait()

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        started = time.monotonic()
        while self.poll() is None:
            if timeout is not None and time.monotonic() - started > timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _begins(word):
    """Whether a word of a command line is the first one that is no option of the interpreter."""
    return word == "-m" or not word.startswith("-")


def _begin(env, stdout, stderr):
    """Forget what a new process would not know, and take these variables and files."""
    os.setsid()
    atexit._clear()
    gc.freeze()  # the objects of the process that was copied are not this one's to destroy
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(env)
    for stream, file in ((sys.stdout, stdout), (sys.stderr, stderr)):
        if file is not None:
            os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)
    sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))


def _end(arguments) -> NoReturn:
    """Run a program, and end as an interpreter does."""
    from drivetrain_launch.ranks.worker import code_of, run

    code = 1
    try:
        if arguments[0] == "-m":
            sys.modules.pop(arguments[1], None)  # runpy warns of modules that it runs again
        code = run(list(arguments))
    except SystemExit as error:
        code = code_of(error)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
