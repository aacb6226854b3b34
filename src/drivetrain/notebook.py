"""Runs a function on several processes, from a notebook or from a script.

A function of a notebook cell cannot be pickled, so the processes are forked: then they have it
already. They meet through a file in a private folder; no port is opened.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from drivetrain.config import Layer, dump_yaml, read_file
from drivetrain.config.document import ORIGINS_KEY
from drivetrain.errors import UsageError
from drivetrain.runtime.world import CONFIG_VARIABLE, launched_config

STOP_S = 5.0
"""Seconds for a process to end after another's failure, before it is killed."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    *,
    mixed_precision: str | None = None,
    start_method: str = "fork",
    timeout: timedelta = timedelta(minutes=10),
) -> None:
    """Run a function on several processes and wait for all of them.

    Inside, ``Accelerator()`` finds its rank as it does under ``drivetrain launch``.

    Args:
        function: called with ``args`` in every process; its result is dropped.
        args: positional arguments.
        num_processes: number of processes; None takes one per accelerator, or per core without.
        mixed_precision: of each ``Accelerator()`` that chooses none; None leaves it to the launch
            configuration of this process.
        start_method: ``fork`` for functions of a notebook; ``spawn`` for importable ones.
        timeout: how long a collective may wait.

    Raises:
        UsageError: an accelerator is in use already, which a forked process cannot share; or this
            process is itself a rank; or num_processes is not positive.
        torch.multiprocessing.ProcessRaisedException: the function raised in a process; the message
            holds the traceback of the first failure. The others were stopped.
        torch.multiprocessing.ProcessExitedException: a process died of a signal or left by itself.
    """
    count = num_processes if num_processes is not None else _places()
    _check(count, start_method)
    config = _configuration("precision", mixed_precision) if mixed_precision else ""
    _start(function, tuple(args), count, start_method, timeout, config)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> None:
    """Run a function on a few processes on the CPU, to try out distributed code.

    The launch configuration of this process, such as its strategy, holds in all of them.

    Args:
        function: called with ``args`` in every process.
        args: positional arguments.
        num_processes: number of processes.

    Errors are those of ``notebook_launcher``.
    """
    _check(num_processes, "fork")
    config = _configuration("launch.device", "cpu")
    _start(function, tuple(args), num_processes, "fork", timedelta(minutes=10), config)


def _configuration(key: str, value: str) -> str:
    """Return this process's launch configuration as YAML, with another value of one key."""
    path = launched_config()
    layer = read_file(path) if path else Layer()
    origins = {name: [origin.kind, origin.text] for name, origin in layer.origins.items()}
    origins[key] = ["file", "arguments of the launcher"]
    values = dict(layer.values)
    part, _, name = key.rpartition(".")
    values |= {part: {**values.get(part, {}), name: value}} if part else {name: value}
    return dump_yaml({**values, ORIGINS_KEY: origins})


def _start(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    count: int,
    start_method: str,
    timeout: timedelta,
    config: str,
) -> None:
    """Start the processes and wait for them; they read this configuration, if any."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        store = str(Path(folder, "store"))
        variables = {}
        if config:
            variables[CONFIG_VARIABLE] = str(Path(folder, "config.yaml"))
            Path(variables[CONFIG_VARIABLE]).write_text(config, encoding="utf-8")
        context = multiprocessing.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _run_rank,
            args=(function, args, count, store, timeout, variables),
            nprocs=count,
            join=False,
            start_method=start_method,
        )
        try:
            while not context.join():
                pass
        finally:
            _stop(context.processes)


def _run_rank(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    count: int,
    store: str,
    timeout: timedelta,
    variables: Mapping[str, str],
) -> None:
    """Become one rank: torchrun's variables, the process group, the function."""
    os.environ.update(
        variables,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
    )
    # A forked process has none of its parent's compute threads, and waits for them forever when it
    # is asked to use more than one.
    torch.set_num_threads(1)
    if count > 1:
        met = dist.FileStore(store, count)  # type: ignore[attr-defined]
        dist.init_process_group(_backend(), store=met, rank=rank, world_size=count, timeout=timeout)
        # Gloo fails on ranks that still connect when a rank with nothing to exchange has ended.
        met.set(f"connected/{rank}", "")
        met.wait([f"connected/{each}" for each in range(count)], timeout)
    function(*args)
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend() -> str:
    path = launched_config()
    chosen = read_file(path).values.get("launch", {}).get("device") if path else None
    on_cpu = chosen == "cpu" or not torch.accelerator.is_available()
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    return str(dist.get_default_backend_for_device(device or torch.device("cpu")))


def _check(count: int, start_method: str) -> None:
    if count < 1:
        raise UsageError(f"expected at least one process, found num_processes={count}")
    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            "this process is a rank already; call the function itself here, and the launcher from "
            "a process that has no process group"
        )
    if start_method == "fork" and _accelerator_in_use():
        raise UsageError(
            "an accelerator is in use in this process, and a forked process cannot share it; "
            "restart the notebook, build models and Accelerator() inside the function alone, and "
            "call the launcher first"
        )


def _accelerator_in_use() -> bool:
    if not torch.accelerator.is_available():
        return False
    device = torch.get_device_module(torch.accelerator.current_accelerator())
    return bool(device.is_initialized())


def _places() -> int:
    if torch.accelerator.is_available():
        return torch.accelerator.device_count()
    return os.cpu_count() or 1


def _stop(processes: Sequence[Any]) -> None:
    """End the processes that are left: none when all went well."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(STOP_S)
        if process.is_alive():
            with suppress(ProcessLookupError):
                process.kill()
            process.join()
