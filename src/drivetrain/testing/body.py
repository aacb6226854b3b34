"""Runs the body of a test as one rank: import it, join the others, call it, leave nothing."""

import ast
import gc
import importlib.util
import multiprocessing
import os
import pickle
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _world

from drivetrain import Accelerator
from drivetrain.runtime.world import LOOPBACK
from drivetrain.testing.messages import Kind, RankOutcome, RankTest

_START_TIMEOUT = timedelta(seconds=300)
_ALLOWED_VARIABLES = ("TORCH", "TRITON", "KINETO", "KMP_", "PYTORCH")
_ALLOWED_THREADS = ("Dummy-", "TMonitor", "InductorSubproc", "drivetrain-testing")
_PATIENCE_S = 20.0


def execute(job: RankTest) -> Iterator[RankOutcome]:
    """Yield the outcome of the body, then, asked again, the outcome of leaving it.

    Between the two every rank keeps its process group, so that no rank closes connections that a
    slower one still reads from.
    """
    torch.set_num_threads(1)
    _freeze()
    guard = LeakGuard()
    try:
        with _warnings(job), _joined(job), _freed():
            yield _outcome_of(job)
    except Exception as error:
        yield _failure(job, error)
        return
    leaks = guard.leaks()
    kind: Kind = "failed" if leaks else "passed"
    worn = len(_kept) > _MOST_KEPT
    yield RankOutcome(job.rank, kind, "the test left something behind", "\n".join(leaks), worn=worn)


@contextmanager
def _freed() -> Iterator[None]:
    """Free the Accelerators that are made meanwhile, the last one first, when all have ended."""
    made: list[Accelerator] = []
    own = Accelerator.__init__

    @wraps(own)
    def noted(accelerator: Accelerator, *args: Any, **options: Any) -> None:
        own(accelerator, *args, **options)
        made.append(accelerator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "__init__", noted)
        yield
    while made:
        made.pop().free_memory()


def _outcome_of(job: RankTest) -> RankOutcome:
    try:
        _call(job)
    except pytest.skip.Exception as skip:
        return RankOutcome(job.rank, "skipped", str(skip.msg))
    except pytest.xfail.Exception as xfail:
        return RankOutcome(job.rank, "xfailed", str(xfail.msg))
    except BaseException as error:  # SystemExit of the code under test must not end this process
        return _failure(job, error)
    return RankOutcome(job.rank, "passed")


def _failure(job: RankTest, error: BaseException) -> RankOutcome:
    shown = _without_kit(error.__traceback__)
    details = "".join(traceback.format_exception(type(error), error, shown))
    first_line = (str(error).splitlines() or [""])[0]
    return RankOutcome(job.rank, "failed", f"{type(error).__name__}: {first_line}", details)


def _call(job: RankTest) -> None:
    sys.path[:] = job.search_path
    holder: Any = _module(job)
    arguments = {name: _unpickled(name, data) for name, data in job.arguments.items()}
    for name in job.owner:
        holder = getattr(holder, name)
    if job.owner:
        holder = holder()
    torch.manual_seed(0)
    random.seed(0)
    try:
        getattr(holder, job.function)(**arguments)
    finally:
        for given in arguments.values():
            if isinstance(given, pytest.MonkeyPatch):
                given.undo()  # this process runs other tests, and pytest's own knows of no change


def _unpickled(name: str, data: bytes) -> Any:
    try:
        return pickle.loads(data)  # noqa: S301 (written by the pytest process a moment ago)
    except Exception as error:
        error.add_note(f"while receiving the fixture or parameter {name!r} on this rank")
        raise


@contextmanager
def _warnings(job: RankTest) -> Iterator[None]:
    with warnings.catch_warnings():
        for rule in job.filters:
            warnings.filterwarnings(*rule)  # type: ignore[arg-type]
        yield


@contextmanager
def _joined(job: RankTest) -> Iterator[None]:
    """Make this process one rank among the others, as a launcher would."""
    place = {
        "RANK": str(job.rank),
        "WORLD_SIZE": str(job.size),
        "LOCAL_RANK": str(job.rank),
        "LOCAL_WORLD_SIZE": str(job.size),
    }
    os.environ.update(place)
    # Of a test before, in which torch, or Python, printed an error: runs take it for their own.
    sys.__dict__.pop("last_value", None)
    try:
        join_group(job)
        yield
    finally:
        leave_groups()
        for name in place:
            os.environ.pop(name, None)


def _module(job: RankTest) -> ModuleType:
    """Import the file of the test once, under pytest's name for the module."""
    known = sys.modules.get(job.module)
    if known is not None and known.__file__ == job.path:
        return known
    spec = importlib.util.spec_from_loader(job.module, _TestLoader(job.module, job.path))
    if spec is None:
        raise ImportError(f"cannot import {job.path}")
    module = importlib.util.module_from_spec(spec)
    _add_parents(job.module)
    sys.modules[job.module] = module
    try:
        _TestLoader(job.module, job.path).exec_module(module)
    except BaseException:
        del sys.modules[job.module]
        raise
    return module


def _add_parents(name: str) -> None:
    """Make the packages above a test file importable: pickle imports them before the file."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        _add_parents(parent)
        package = ModuleType(parent)
        package.__path__ = []
        sys.modules[parent] = package


class _TestLoader(SourceFileLoader):
    """Compiles a test file with pytest's asserts, past the byte-code cache of ordinary imports."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


def _without_kit(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of this file: the reader wants to see the test."""
    shown = trace
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next
    return shown or trace


def join_group(job: RankTest) -> None:
    """Make this process a rank of a fresh gloo group, if the test has more than one rank."""
    if job.size > 1:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(job.rendezvous, _store(job.store_port)),
            rank=job.rank,
            world_size=job.size,
            timeout=timedelta(seconds=job.timeout_s),
        )


_outliving: WeakSet[dist.ProcessGroup] = WeakSet()
"""The groups that something refers to after their test, such as a thread that is about to end."""

_kept: WeakSet[dist.ProcessGroup] = WeakSet()
"""The groups that something still referred to after the next test: they live on."""

_MOST_KEPT = 4
"""How many of them a process may have before another one takes its rank."""


def leave_groups() -> None:
    """Destroy every process group of this process and return when their connections are closed.

    gloo closes a connection at a tick of its event loop, up to 10 ms away, one after the other. For
    several groups this is most of the time of a short test: so each is closed by a thread. A group
    that lives on has three threads, which wake up a hundred times in a second.
    """
    if not dist.is_initialized():
        return
    groups = list(_world.pg_map)
    dist.destroy_process_group()
    gc.collect()  # what else refers to a group, and would close it in the middle of a later test
    _kept.update(_outliving)
    _outliving.clear()
    _outliving.update(groups)
    closing = [threading.Thread(target=groups[i : i + 1].clear) for i in range(len(groups))]
    groups.clear()
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def _freeze() -> None:
    """Take what is left, new modules above all, out of collections: it lives on.

    Otherwise every collection in a test walks through it, for modules of torch a fifth of a second.
    While a group outlives its test all is left in: what refers to it may be garbage soon.
    """
    gc.collect()
    if not _outliving:
        gc.freeze()


def _store(port: int) -> TCPStore:
    """Return the connection of this process to the store, a new one if a test has cut it."""
    try:
        _connection(port).check(["alive"])
    except dist.DistError:
        _connection.cache_clear()
    return _connection(port)


@cache
def _connection(port: int) -> TCPStore:
    # Made once: torch looks up the name of the address for it, which can take seconds.
    return TCPStore(LOOPBACK, port, timeout=_START_TIMEOUT, wait_for_workers=False)


class LeakGuard:
    """Remembers the state of the process; ``leaks`` lists the differences and puts them back."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._threads = set(threading.enumerate())
        self._children = set(multiprocessing.active_children())
        self._folder = Path.cwd()
        self._settings = {name: read() for name, (read, _) in _SETTINGS.items()}
        self._uncaught: list[str] = []
        self._hooks = (threading.excepthook, sys.unraisablehook)
        threading.excepthook = self._on_thread_exception
        sys.unraisablehook = self._on_unraisable

    def leaks(self) -> list[str]:
        """Return one line per leak; environment, folder, hooks and settings are restored."""
        threading.excepthook, sys.unraisablehook = self._hooks
        found = [*self._uncaught, *self._new_variables(), *self._new_settings()]
        if Path.cwd() != self._folder:
            found.append(f"the working folder is still {Path.cwd()}; change it back")
            os.chdir(self._folder)
        return [*found, *self._still_running()]

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "?"
        self._uncaught.append(
            f"thread {name!r} ended with {args.exc_type.__name__}: {args.exc_value}"
        )
        self._hooks[0](args)

    def _on_unraisable(self, args: "sys.UnraisableHookArgs") -> None:
        self._uncaught.append(f"{args.exc_value!r} was ignored in {args.object!r}")
        self._hooks[1](args)

    def _new_variables(self) -> list[str]:
        before, after = self._environment, dict(os.environ)
        found = []
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name) and not name.startswith(_ALLOWED_VARIABLES):
                found.append(
                    f"the variable {name} changed from {before.get(name)!r} to {after.get(name)!r}"
                )
        os.environ.clear()
        os.environ.update(before)
        return found

    def _new_settings(self) -> list[str]:
        found = []
        for name, (read, write) in _SETTINGS.items():
            before, after = self._settings[name], read()
            if before != after:
                found.append(f"torch's {name} changed from {before} to {after}")
                write(before)
        return found

    def _still_running(self) -> list[str]:
        """Return threads and children that do not end within a moment."""
        deadline = time.monotonic() + _PATIENCE_S
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return running

    def _running(self) -> list[str]:
        threads = [
            f"the thread {thread.name!r} still runs; join it"
            for thread in threading.enumerate()
            if thread not in self._threads
            and not thread.name.startswith(_ALLOWED_THREADS)
            and type(thread).__name__ not in _ALLOWED_THREADS
        ]
        children = set(multiprocessing.active_children()) - self._children
        return threads + [f"the process {child.name!r} still runs; join it" for child in children]


def _read_hooks() -> Any:
    """Return the innermost hooks on tensors that autograd saves; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _pop_hooks(until: Any) -> None:
    while _read_hooks() not in (None, until):
        torch._C._autograd._pop_saved_tensors_default_hooks()


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "hooks on saved tensors": (_read_hooks, _pop_hooks),
    "deterministic mode": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
}
