"""Finds the remains of a test in its process: threads, variables, settings, children."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_ALLOWED_VARIABLES = ("TORCH", "TRITON", "KINETO", "KMP_", "PYTORCH")
_ALLOWED_THREADS = ("Dummy-", "TMonitor", "InductorSubproc", "drivetrain-testing")
_PATIENCE_S = 2.0


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
