"""The processes of a run: started by a notebook, who am I among them, and acting on one or in turn.

A function of a notebook cell cannot be pickled, so the processes are forked: then they have it
already. They meet through a file in a private folder; no port is opened.
"""

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.utils.data import Dataset, Subset

from drivetrain import communication
from drivetrain.config import Layer, dump_yaml, read_file
from drivetrain.config.document import ORIGINS_KEY, put
from drivetrain.errors import UsageError
from drivetrain.runtime.world import CONFIG_VARIABLE, World, launched_config, leave_others


class DistributedType(StrEnum):
    """The kind of device that the processes compute on, whatever the strategy.

    Members without ``MULTI`` name engines and devices that no run here has, for scripts that ask.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MPS = "MULTI_MPS"
    MULTI_OTHER = "MULTI_OTHER"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_SDAA = "MULTI_SDAA"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"
    TP = "TP"
    TPU = "TPU"
    XLA = "XLA"


class StaysInProcess:
    """An object that holds a process's part of a run, and so is neither pickled nor copied."""

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "expected the Accelerator to stay in its process, found that it is pickled or copied; "
            "make one in each process, and leave it out of objects to pickle"
        )


class Processes:
    """Identity and control of one process among all.

    Args:
        world: this process among all processes.
    """

    def __init__(self, world: World) -> None:
        self._processes_world = world

    @property
    def device(self) -> torch.device:
        """The device this process computes on."""
        return self._processes_world.device

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return self._processes_world.size

    @property
    def process_index(self) -> int:
        """Index of this process among all, from 0."""
        return self._processes_world.rank

    @property
    def local_process_index(self) -> int:
        """Index of this process on its host, from 0."""
        return self._processes_world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self._processes_world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self._processes_world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def deepspeed_plugin(self) -> None:
        """None, for scripts that ask: ``strategy`` chooses the algorithm here."""
        return

    @property
    def fsdp_plugin(self) -> None:
        """None, for scripts that ask: ``strategy`` chooses the algorithm here."""
        return

    @property
    def fp8_recipe_handler(self) -> None:
        """None, for scripts that ask: ``precision: fp8`` needs no recipe of Accelerate's."""
        return

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of device that the processes compute on; NO for one process."""
        if not self.use_distributed:
            return DistributedType.NO
        kind = {"cuda": "gpu"}.get(self.device.type, self.device.type)
        return DistributedType.__members__.get(f"MULTI_{kind.upper()}", DistributedType.MULTI_OTHER)

    def wait_for_everyone(self) -> None:
        """Return when every process has come here.

        Raises:
            CollectiveError: a process does not come; the message says which, and what it did last.
        """
        communication.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process only."""
        if self.is_main_process:
            print(*args, **kwargs)  # noqa: T201 - this is the point

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run on the main process; elsewhere it returns None."""
        return self._decorator(lambda: self.is_main_process, function)

    def on_local_main_process(
        self, function: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run on the first process of each host."""
        return self._decorator(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run on the last process."""
        return self._decorator(lambda: self.is_last_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run on the process of one index; elsewhere it returns None.

        Raises:
            UsageError: no index was given.
        """
        if process_index is None:
            raise UsageError("expected process_index=N for on_process(), found none")
        return self._decorator(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run on the process of one index on each host.

        Raises:
            UsageError: no index was given.
        """
        if local_process_index is None:
            raise UsageError("expected local_process_index=N for on_local_process(), found none")
        return self._decorator(lambda: self.local_process_index == local_process_index, function)

    def destroy_process_group(self) -> None:
        """Leave the other processes, at the end of a script; nothing to do for one process."""
        if dist.is_available() and dist.is_initialized():
            leave_others()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context that the main process leaves, also by an exception, before others enter."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Context that the first process of each host leaves before others enter."""
        return self._first(self.is_local_main_process)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Context with this process's share of the inputs.

        The share is new; the inputs stay as they are.

        Args:
            inputs: a list, tuple, tensor, array, dataset, or a dict of equally long ones; the
                first processes get one element more where the length does not divide.
            apply_padding: repeat the last element so that all shares are equally long.

        Raises:
            UsageError: dict values of different lengths, or inputs that cannot be cut.
        """
        yield self._share(inputs, apply_padding)

    def _share(self, inputs: Any, pad: bool) -> Any:
        if isinstance(inputs, Mapping):
            lengths = {key: _length(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise UsageError(f"expected dict values of one length, found {lengths}")
            return {key: self._share(value, pad) for key, value in inputs.items()}
        length, size, rank = _length(inputs), self.num_processes, self.process_index
        base, extra = divmod(length, size)
        start = rank * base + min(rank, extra)
        indices = list(range(start, start + base + (rank < extra)))
        if pad and length and rank >= extra > 0:
            indices.append(length - 1)
        return _take(inputs, indices)

    def _only(self, here: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return wrapper

    def _decorator(
        self, here: Callable[[], bool], function: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        decorate = functools.partial(self._only, here)
        return decorate if function is None else decorate(function)

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # Also after an exception: the others wait for this barrier.
            if is_first:
                self.wait_for_everyone()


class PartialState(Processes):
    """The processes of a run, for scripts without an Accelerator.

    Args:
        cpu: compute on the CPU even when there is an accelerator.
        backend: communication library; None takes the device's own.
        timeout: how long a collective may wait.

    Raises:
        PreflightError: the ranks cannot find their place or each other.
    """

    def __init__(
        self, cpu: bool = False, *, backend: str | None = None, timeout: timedelta | None = None
    ) -> None:
        super().__init__(World.discover(cpu=cpu, backend=backend, timeout=timeout))


def _length(inputs: Any) -> int:
    # Text has a length, but whoever passes it means one thing, not its letters.
    if isinstance(inputs, Sized) and not isinstance(inputs, str | bytes | Set):
        try:
            return len(inputs)
        except TypeError:  # a tensor without dims, a dataset that only inherits its length
            pass
    raise UsageError(
        f"expected a list, tuple, tensor, dict or dataset with a length, found "
        f"{type(inputs).__name__}; put single things into a list"
    )


def _take(inputs: Any, indices: list[int]) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[torch.tensor(indices, dtype=torch.long, device=inputs.device)]
    if callable(getattr(inputs, "select", None)):  # a Hugging Face dataset
        return inputs.select(indices)
    if isinstance(inputs, Dataset):
        return Subset(inputs, indices)
    if isinstance(inputs, Sequence):
        taken = [inputs[i] for i in indices]
        return tuple(taken) if isinstance(inputs, tuple) else taken
    if hasattr(inputs, "__array__"):
        return inputs.take(indices, 0)
    raise UsageError(
        f"expected a list, tuple, tensor, array, dict or dataset, found {type(inputs).__name__}; "
        "make a list of it"
    )


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
    _start(functools.partial(function, *args), count, start_method, timeout, config)


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
    call = functools.partial(function, *args)
    _start(call, num_processes, "fork", timedelta(minutes=10), config)


def _configuration(key: str, value: str) -> str:
    """Return this process's launch configuration as YAML, with another value of one key."""
    path = launched_config()
    layer = read_file(path) if path else Layer()
    origins = {name: [origin.kind, origin.text] for name, origin in layer.origins.items()}
    origins[key] = ["file", "arguments of the launcher"]
    values = dict(layer.values)
    put(values, key, value)
    return dump_yaml({**values, ORIGINS_KEY: origins})


def _start(
    call: Callable[[], Any], count: int, start_method: str, timeout: timedelta, config: str
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
            args=(call, count, store, timeout, variables),
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
    call: Callable[[], Any],
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
    call()
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
    return len(os.sched_getaffinity(0))


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
