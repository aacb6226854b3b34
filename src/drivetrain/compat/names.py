"""Which object stands for each of Accelerate's names, and the functions among them.

A name of ours comes first; ``names.toml`` says where it is. Names that know nothing of processes,
such as big-model inference, are the real package's where it is installed. Every other known name is
an object that says, when it is used, that it has no counterpart.

What scripts call of Accelerate beside an Accelerator: states, loaders, notebooks, trackers.
"""

import difflib
import importlib
import operator
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import aliases, data, processes
from drivetrain.aliases import WAYS_OUT
from drivetrain.config import DataConfig
from drivetrain.data import PreparedLoader
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.model.modules import uncompiled
from drivetrain.observe.trackers import Tracker
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World

# --- which object stands for each of Accelerate's names ---

FOLLOWED = "1.15.0"
"""The version of Accelerate whose names and arguments these are."""

TABLE: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_name("names.toml").read_text(encoding="utf-8")
)
"""What ``names.toml`` says about Accelerate's names."""

PATHS = frozenset(TABLE["paths"])
"""Accelerate's import paths, below the package."""

_PLACES: dict[str, Sequence[str]] = {
    **{name: ("drivetrain", name) for name in drivetrain.__all__ if not name.startswith("_")},
    **{name: (home, name) for home, names in TABLE["ours"].items() for name in names},
    **TABLE["renamed"],
}
"""The module and the name of each object of ours."""


class NoCounterpart(type):
    """Class of names without counterpart: importing one is no error, using one is.

    ``isinstance(x, name)`` is False.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be called.

        Raises:
            UsageError: says what has no counterpart, and the way to have the same.
        """
        raise UsageError(_no_counterpart(cls.__name__))

    def __getattr__(cls, name: str) -> NoReturn:
        message = _no_counterpart(cls.__name__)
        raise AttributeError(message) if name.startswith("__") else UsageError(message)

    def __instancecheck__(cls, instance: object) -> bool:
        return False

    def _reset_state(cls, *args: Any) -> None:
        """Do nothing, for tests of scripts: no state is shared."""


def resolve(name: str, path: str = "") -> Any:
    """Return the object of a name in Accelerate.

    Args:
        name: as a script imports it.
        path: of the module that it imports from, below ``accelerate``.

    Raises:
        AttributeError: Accelerate has no such name.
    """
    if name in WAYS_OUT:
        return NoCounterpart(name, (), {"__module__": __name__})
    if name in TABLE["dividers"] and _real_module("accelerate.data_loader") is not None:
        return getattr(_real_module("accelerate.data_loader"), name)
    if name in _PLACES:
        home, own = _PLACES[name]
        return getattr(importlib.import_module(home), own)
    if not name.startswith("_"):
        found = _from_real_package(name, path)
        if found is not None:
            return found
    near = difflib.get_close_matches(name, public_names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"drivetrain has no counterpart of accelerate's {name!r}{hint}")


def public_names() -> list[str]:
    """Return the names with a counterpart here, without the real package's."""
    return sorted(_PLACES.keys() - WAYS_OUT.keys())


def _from_real_package(name: str, path: str) -> Any:
    """Return the installed Accelerate's object, or a refusing one; None without such a name."""
    if _real_module("accelerate") is None:
        return None
    if name not in TABLE["stateful"]:
        for home in TABLE["real"]:
            found = vars(_real_module(home) or object).get(name)
            if found is not None:
                return found
    homes = ("accelerate", "accelerate.utils", f"accelerate.{path}".rstrip("."))
    known = any(hasattr(_real_module(home), name) for home in homes)
    return NoCounterpart(name, (), {"__module__": __name__}) if known else None


@cache
def _real_module(name: str) -> Any:
    """Return a module of the real package; None where it is not installed."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    if name == "accelerate.utils.other":  # its own logger needs the real PartialState
        vars(module)["logger"] = get_logger(name)
    return module


def _no_counterpart(name: str) -> str:
    way_out = WAYS_OUT.get(name, "docs/coming-from.md lists what has one")
    return f"accelerate's {name} has no counterpart in drivetrain; {way_out}"


# --- what scripts call of Accelerate beside an Accelerator ---

COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


class Resettable:
    """A state that nobody shares, so that there is nothing to reset."""

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Do nothing, for tests of scripts, which call it between two runs."""


class ScriptPartialState(Resettable, processes.PartialState):
    """The processes of a run, for scripts without an Accelerator."""


class ScriptAcceleratorState(Resettable, aliases.AcceleratorState):
    """The processes of a run and its precision, for scripts without an Accelerator."""


def is_initialized() -> bool:
    """Whether ``AcceleratorState()`` can be asked: always here, for it finds the run itself."""
    return True


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model, compiled or not, is one of peft's."""
    if find_spec("peft") is None:
        return False
    from peft import PeftModel

    return isinstance(uncompiled(model), PeftModel)


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed library, or a version itself, with another one.

    Args:
        library_or_version: the library's name, or a version.
        operation: ``<``, ``<=``, ``==``, ``!=``, ``>=`` or ``>``.
        requirement_version: the other version.

    Raises:
        UsageError: an unknown operation.
    """
    if operation not in COMPARISONS:
        raise UsageError(f"expected one of {', '.join(COMPARISONS)}, found {operation!r}")
    text = str(library_or_version)
    if not text[:1].isdigit():
        text = installed_version(text)
    return bool(COMPARISONS[operation](TorchVersion(text), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch with another one, as ``compare_versions`` does."""
    return compare_versions("torch", operation, version)


# --- accelerate's functions and classes of loaders ---


def prepare_data_loader(  # noqa: PLR0913, PLR0917 - the arguments of Accelerate
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """Divide a loader over processes, by Accelerate's arguments.

    Args:
        dataloader: the user's loader.
        device: of the batches, with ``put_on_device``; None means this process's.
        num_processes: how many parts there are; None means all processes.
        process_index: which part; None means this process's.
        split_batches: divide the loader's batch over the processes instead of giving one to each.
        put_on_device: move batches to the device.
        rng_types: generators that process 0 gives to all when an epoch starts.
        dispatch_batches: process 0 alone reads and sends.
        even_batches: repeat the first samples so that every process has as many full batches.
        slice_fn_for_dispatch: not supported; batches are cut along dim 0.
        use_seedable_sampler: derive the shuffle order from seed and epoch.
        data_seed: seed of the shuffle order.
        non_blocking: copy batches to the device asynchronously.
        use_stateful_dataloader: without effect: every loader knows its position.
        torch_device_mesh: not supported; ``accelerator.prepare`` knows the mesh.

    Raises:
        UsageError: an argument without support, parts that are not the processes for a loader that
            one process reads for all, or a loader that cannot be divided.
    """
    if slice_fn_for_dispatch is not None or torch_device_mesh is not None:
        raise UsageError(
            "expected no slice_fn_for_dispatch and no torch_device_mesh; batches are cut along dim "
            "0, and accelerator.prepare(loader) divides over the mesh of the strategy"
        )
    world = World.discover()
    size = world.size if num_processes is None else num_processes
    rank = world.rank if process_index is None else process_index
    alike = (size, rank) == (world.size, world.rank)
    if dispatch_batches and not alike:
        raise UsageError(
            f"expected num_processes={world.size} and process_index={world.rank} with "
            f"dispatch_batches, found {size} and {rank}; leave them out"
        )
    ranks = tuple(range(size))
    return data.prepare_data_loader(
        dataloader,
        axis=Axis(name="dp", size=size, rank=rank, ranks=ranks, hosts=("localhost",) * size),
        world=world if alike else World(),
        config=DataConfig(
            split_batches=split_batches,
            dispatch_batches=dispatch_batches if alike else False,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking,
        ),
        seed=None,
        delivery=data.Delivery(
            device=(device or world.device) if put_on_device else None,
            rng_types=tuple(str(getattr(each, "value", each)) for each in rng_types or ()),
        ),
    )


class LoaderClass(type):
    """Class of ``DataLoaderShard`` and ``DataLoaderDispatcher``, whose instances prepare() makes.

    Attributes:
        dispatched: whether process 0 reads for all.
    """

    dispatched: bool

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, PreparedLoader) and instance.is_dispatched is cls.dispatched

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        """Refuse to be called.

        Raises:
            UsageError: says how such loaders are made.
        """
        raise UsageError(
            f"expected a torch DataLoader, found a call of {cls.__name__}; pass the DataLoader to "
            "accelerator.prepare, with DataLoaderConfiguration(dispatch_batches="
            f"{cls.dispatched})"
        )


class DataLoaderShard(metaclass=LoaderClass):
    """For scripts that ask ``isinstance(loader, DataLoaderShard)``."""

    dispatched = False


class DataLoaderDispatcher(metaclass=LoaderClass):
    """For scripts that ask ``isinstance(loader, DataLoaderDispatcher)``."""

    dispatched = True


# --- ``notebook_launcher`` with Accelerate's arguments ---


def notebook_launcher(  # noqa: PLR0913, PLR0917 - the arguments of Accelerate
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Any = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a function on several processes of this host and wait for all of them.

    The processes meet in a file: addresses, ports and names of a rendezvous have no effect.

    Args:
        function: called with ``args`` in every process.
        args: positional arguments.
        num_processes: number of processes; None takes one per accelerator, or per core without.
        mixed_precision: ``no`` leaves it to the launch configuration.
        use_port: without effect.
        master_addr: without effect.
        node_rank: without effect.
        num_nodes: number of hosts, 1.
        rdzv_backend: without effect.
        rdzv_endpoint: without effect.
        rdzv_conf: without effect.
        rdzv_id: without effect.
        max_restarts: how often all processes start again after one has failed.
        monitor_interval: without effect: a failure is seen at once.
        log_line_prefix_template: without effect.

    Raises:
        UsageError: several hosts.

    Other errors are those of ``drivetrain.notebook_launcher``.
    """
    if num_nodes != 1:
        raise UsageError(
            f"expected notebook_launcher to start one host, found num_nodes={num_nodes}; write the "
            "function to a script, and take 'drivetrain launch' with --nnodes"
        )
    precision = None if mixed_precision == "no" else str(mixed_precision)
    for restarts in range(max_restarts + 1):
        try:
            processes.notebook_launcher(function, args, num_processes, mixed_precision=precision)
        except (ProcessRaisedException, ProcessExitedException):
            if restarts == max_restarts:
                raise
        else:
            return


# --- tracker classes that a script registers, for ``log_with`` to name ---


LOGGER_TYPE_TO_CLASS: dict[str, type[Tracker]] = {}
"""The registered classes by name; installed trackers are found without being here."""


def register_tracker_class(tracker_class: type[Tracker]) -> None:
    """Let ``Accelerator(log_with=tracker_class.name)`` find a class.

    Raises:
        UsageError: no class of trackers, or one without a name.
    """
    is_tracker = isinstance(tracker_class, type) and issubclass(tracker_class, Tracker)
    name = getattr(tracker_class, "name", None)
    if not is_tracker or not name:
        raise UsageError(
            f"expected a subclass of GeneralTracker with a name, found {tracker_class!r}; derive "
            "it from GeneralTracker, and set its attribute name"
        )
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"the tracker {name!r} was registered before, and is now {tracker_class!r}",
            UserWarning,
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def registered(log_with: Any) -> Any:
    """Return ``log_with`` with registered classes in place of their names."""
    if isinstance(log_with, list | tuple):
        return [registered(each) for each in log_with]
    return LOGGER_TYPE_TO_CLASS.get(log_with, log_with) if isinstance(log_with, str) else log_with


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of a tracker run in process 0 alone where ``main_process_only`` is True."""

    @wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not World.discover().is_main:
            return None
        return function(self, *args, **kwargs)

    return method
