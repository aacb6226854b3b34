"""drivetrain: one loop, any parallelism.

The public names are imported when they are first used, so that the command line starts without
importing torch. Every name that a training script written for Accelerate imports from
``accelerate``, ``accelerate.utils`` or ``accelerate.logging`` is here, under the same name.
"""

import gc
import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from drivetrain._version import __version__ as __version__

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator as Accelerator
    from drivetrain.strategy import Strategy as Strategy

_HOMES = {
    "drivetrain.accelerator": "Accelerator",
    "drivetrain.aliases": (
        "AcceleratedOptimizer AcceleratedScheduler AcceleratorState DataLoaderShard "
        "DistributedOperationException GeneralTracker extract_model_from_parallel"
    ),
    "drivetrain.availability": (
        "is_bf16_available is_cuda_available is_datasets_available is_deepspeed_available "
        "is_mlflow_available is_mps_available is_peft_available is_rich_available "
        "is_schedulefree_available is_tensorboard_available is_tqdm_available "
        "is_trackio_available is_transformers_available is_wandb_available is_xpu_available "
        "patch_environment"
    ),
    "drivetrain.checkpoint.encoding": "load save",
    "drivetrain.checkpoint.export": "read_export",
    "drivetrain.communication": (
        "CannotPadNestedTensorWarning broadcast broadcast_object_list gather gather_object "
        "pad_across_processes reduce wait_for_everyone"
    ),
    "drivetrain.config": "option section",
    "drivetrain.cost": "Cost ModelSpec",
    "drivetrain.errors": (
        "CheckpointError CollectiveError ConfigError DrivetrainError NonFiniteError "
        "PreflightError RankMismatchError StorageError UnknownPluginError UsageError"
    ),
    "drivetrain.facade.settings": (
        "AORecipeKwargs AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration "
        "DistributedDataParallelKwargs GradScalerKwargs GradientAccumulationPlugin "
        "InitProcessGroupKwargs ProfileKwargs ProjectConfiguration"
    ),
    "drivetrain.local_sgd": "LocalSGD",
    "drivetrain.log": "get_logger progress tqdm",
    "drivetrain.memory": "find_executable_batch_size release_memory",
    "drivetrain.nested": (
        "concatenate convert_to_fp32 find_batch_size honor_type recursively_apply "
        "send_to_device slice_tensors"
    ),
    "drivetrain.processes": "DistributedType PartialState debug_launcher notebook_launcher",
    "drivetrain.data": "prepare_data_loader skip_first_batches",
    "drivetrain.data.division": "SeedableRandomSampler",
    "drivetrain.runtime.gradient_state": "GradientState",
    "drivetrain.data.loader": "synchronize_rng_states",
    "drivetrain.runtime.rng": "set_seed",
    "drivetrain.runtime.parts": "Part",
    "drivetrain.shards": "Reader Shard",
    "drivetrain.store": "TensorStore",
    "drivetrain.strategy": "Form Prepared Run Strategy",
    "drivetrain.observe.trackers": "Tracker",
}
"""By module, the names that it holds."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_HOME_OF])  # noqa: PLE0605 - computed from the table above


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        # What an import makes stays. A look for garbage in the middle of it, which goes through all
        # objects of torch, takes as long as half of the import.
        looks = gc.isenabled()
        gc.disable()
        try:
            return getattr(importlib.import_module(home), name)
        finally:
            if looks:
                gc.enable()
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        way_out = importlib.import_module("drivetrain.aliases").missing_name(name)
        if way_out:  # an AttributeError would lose the text in 'from drivetrain import name'
            raise ImportError(way_out)
    raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
