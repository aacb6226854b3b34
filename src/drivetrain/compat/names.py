"""Which object stands for each of Accelerate's names: ours, the real package's, or an error.

A name of ours comes first. Names that know nothing of processes, such as big-model inference, are
the real package's where it is installed. Every other known name is an object that says, when it
is used, that it has no counterpart.
"""

import difflib
import importlib
from functools import lru_cache
from typing import Any, NoReturn

import drivetrain
from drivetrain.aliases import WAYS_OUT
from drivetrain.errors import UsageError
from drivetrain.log import get_logger

FOLLOWED = "1.15.0"
"""The version of Accelerate whose names and arguments these are."""

PATHS = frozenset(
    {
        *("accelerator", "big_modeling", "checkpointing", "data_loader", "hooks", "inference"),
        *("launchers", "local_sgd", "logging", "memory_utils", "optimizer", "parallelism_config"),
        *("scheduler", "state", "tracking", "utils", "utils.bnb", "utils.constants"),
        *("utils.dataclasses", "utils.deepspeed", "utils.environment", "utils.fsdp_utils"),
        *("utils.imports", "utils.megatron_lm", "utils.memory", "utils.modeling"),
        *("utils.offload", "utils.operations", "utils.other", "utils.random", "utils.versions"),
    }
)
"""Accelerate's import paths, below the package."""

_HOMES = {
    "drivetrain.compat.functions": (
        *("DataLoaderDispatcher", "DataLoaderShard", "LOGGER_TYPE_TO_CLASS", "compare_versions"),
        *("is_initialized", "is_peft_model", "is_torch_version", "notebook_launcher"),
        *("prepare_data_loader", "register_tracker_class"),
    ),
    "drivetrain.compat.plugins": (
        *("DeepSpeedPlugin", "DynamoBackend", "FullyShardedDataParallelPlugin", "LoggerType"),
        *("MegatronLMPlugin", "ParallelismConfig", "PrecisionType", "RNGType"),
        *("TorchDynamoPlugin", "TorchTensorParallelPlugin"),
    ),
}
_OURS = {name: "drivetrain" for name in drivetrain.__all__ if not name.startswith("_")} | {
    name: home for home, names in _HOMES.items() for name in names
}
_RENAMED = {
    "Accelerator": ("drivetrain.compat.accelerator", "ScriptAccelerator"),
    "AcceleratorState": ("drivetrain.compat.functions", "ScriptAcceleratorState"),
    "PartialState": ("drivetrain.compat.functions", "ScriptPartialState"),
    "TensorBoardTracker": ("drivetrain.tracking.adapters", "TensorboardTracker"),
    "WandBTracker": ("drivetrain.tracking.adapters", "WandbTracker"),
    "TrackioTracker": ("drivetrain.tracking.adapters", "TrackioTracker"),
    "MLflowTracker": ("drivetrain.tracking.adapters", "MlflowTracker"),
    **{
        name: ("drivetrain.tracking.adapters", name)
        for name in (
            *("AimTracker", "ClearMLTracker", "CometMLTracker", "DVCLiveTracker"),
            "SwanLabTracker",
        )
    },
}

_REAL = (
    *("accelerate.big_modeling", "accelerate.hooks", "accelerate.utils.bnb"),
    *("accelerate.utils.constants", "accelerate.utils.environment", "accelerate.utils.imports"),
    *("accelerate.utils.memory", "accelerate.utils.modeling", "accelerate.utils.offload"),
    *("accelerate.utils.operations", "accelerate.utils.other", "accelerate.utils.versions"),
)
"""Modules of the real package whose functions know nothing of processes."""

_DIVIDERS = frozenset(
    {"BatchSamplerShard", "IterableDatasetShard", "SeedableRandomSampler", "SkipBatchSampler"}
)
"""Samplers of ``accelerate.data_loader`` that are told of processes by their caller."""

_STATEFUL = {"GatheredParameters", "convert_model", "write_basic_config"}
"""Names of these modules that do."""


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
    if name in _DIVIDERS and _real_module("accelerate.data_loader") is not None:
        return getattr(_real_module("accelerate.data_loader"), name)
    if name in _RENAMED or name in _OURS:
        home, own = _RENAMED.get(name, (_OURS.get(name, ""), name))
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
    return sorted({*_RENAMED, *_OURS} - WAYS_OUT.keys())


def _from_real_package(name: str, path: str) -> Any:
    """Return the installed Accelerate's object, or a refusing one; None without such a name."""
    if _real_module("accelerate") is None:
        return None
    if name not in _STATEFUL:
        for home in _REAL:
            found = vars(_real_module(home) or object).get(name)
            if found is not None:
                return found
    homes = ("accelerate", "accelerate.utils", f"accelerate.{path}".rstrip("."))
    known = any(hasattr(_real_module(home), name) for home in homes)
    return NoCounterpart(name, (), {"__module__": __name__}) if known else None


@lru_cache(maxsize=len(_REAL) + 2)
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
    way_out = WAYS_OUT.get(name, "docs/migrating-from-accelerate.md lists what has one")
    return f"accelerate's {name} has no counterpart in drivetrain; {way_out}"
