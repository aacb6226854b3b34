"""Names from Accelerate's scripts that have another name here, or none: then the way out."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Self

from torch import nn

from drivetrain.config import read_file
from drivetrain.data import PreparedLoader as DataLoaderShard
from drivetrain.errors import RankMismatchError as DistributedOperationException
from drivetrain.errors import UsageError
from drivetrain.facade.stepping import PreparedOptimizer as AcceleratedOptimizer
from drivetrain.facade.stepping import PreparedScheduler as AcceleratedScheduler
from drivetrain.model.modules import uncompiled
from drivetrain.observe.trackers import Tracker as GeneralTracker
from drivetrain.processes import PartialState
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import launched_config

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "AcceleratorState",
    "DataLoaderShard",
    "DistributedOperationException",
    "GeneralTracker",
    "extract_model_from_parallel",
]

WAYS_OUT = {
    "GradientState": "ask accelerator.sync_gradients and accelerator.gradient_state",
    "SkipDataLoader": "take skip_first_batches(loader, num_batches)",
    "DummyOptim": "make an optimizer of torch.optim, which any strategy takes",
    "DummyScheduler": "make a scheduler of torch.optim.lr_scheduler",
    "prepare_pippy": "take strategy: {name: ..., pp: N} of the configuration",
    "write_basic_config": "run 'drivetrain config'",
    "FP8RecipeKwargs": "take mixed_precision='fp8', by torchao, and AORecipeKwargs",
    "TERecipeKwargs": "take mixed_precision='fp8', by torchao, and AORecipeKwargs",
    "MSAMPRecipeKwargs": "take mixed_precision='fp8', by torchao, and AORecipeKwargs",
    "MegatronLMDummyDataLoader": "prepare() the script's own loader",
    "MegatronLMDummyScheduler": "prepare() the script's own scheduler",
    "GPTTrainStep": "the script's own loop trains under any strategy",
    "BertTrainStep": "the script's own loop trains under any strategy",
    "T5TrainStep": "the script's own loop trains under any strategy",
}
"""For names without a counterpart: the way to have the same here."""

AS_IT_IS = "or run the script as it was written, with 'drivetrain launch --as-accelerate'"
STRATEGY = "take Accelerator(strategy='name') or strategy={'name': ..., option: value}"
COMPILE = "take config={'compile': 'blocks'}, or torch.compile(model) before prepare"

ARGUMENTS = {
    **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin"), STRATEGY),
    **dict.fromkeys(("megatron_lm_plugin", "torch_tp_plugin", "parallelism_config"), STRATEGY),
    **dict.fromkeys(("dynamo_backend", "dynamo_plugin"), COMPILE),
}
"""Arguments of Accelerate's Accelerator that ours lacks: the way to have the same here."""

PLUGINS = {
    **dict.fromkeys(("DeepSpeedPlugin", "FullyShardedDataParallelPlugin"), STRATEGY),
    **dict.fromkeys(("MegatronLMPlugin", "ParallelismConfig"), STRATEGY),
    "TorchTensorParallelPlugin": STRATEGY,
    "TorchDynamoPlugin": COMPILE,
}

WITHOUT_PROCESSES = frozenset(
    {
        *("cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model"),
        *("get_balanced_memory", "get_max_memory", "infer_auto_device_map", "init_empty_weights"),
        *("init_on_device", "load_checkpoint_and_dispatch", "load_checkpoint_in_model"),
    }
)
"""Functions for big models that scripts go on importing from Accelerate."""


class AcceleratorState(PartialState):
    """The processes of a run and its precision, for scripts without an Accelerator at hand.

    Args:
        mixed_precision: ``no``, ``bf16``, ``fp16`` or ``fp8``; None takes that of the launch
            configuration.
        cpu: compute on the CPU even when there is an accelerator.
        backend: communication library; None takes the device's own.
        timeout: how long a collective may wait.

    Raises:
        ConfigError: an unknown precision.
    """

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(cpu=cpu, backend=backend, timeout=timeout)
        path = launched_config()
        configured = read_file(path).values.get("precision", "no") if path else "no"
        self.precision = Precision.of(mixed_precision or str(configured))

    @property
    def mixed_precision(self) -> str:
        """The precision of the run: no, bf16, fp16 or fp8."""
        return self.precision.name


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the user's own module, for code without an Accelerator at hand.

    Args:
        model: prepared by a strategy that works in hooks, compiled, or wrapped by torch's
            DataParallel or DistributedDataParallel, inside or outside of the compiled module.
        keep_fp32_wrapper: without effect; ``Accelerator.unwrap_model`` undoes the precision of
            forward.
        keep_torch_compile: False returns the module inside a compiled one.
    """
    del keep_fp32_wrapper
    inner = uncompiled(model)
    while isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = _compiled_alike(inner.module, model)
        inner = uncompiled(model)
    return model if keep_torch_compile else inner


def _compiled_alike(module: nn.Module, outer: nn.Module) -> nn.Module:
    """Return a module compiled as the wrapper around the module is, if the wrapper is compiled."""
    if uncompiled(outer) is outer or uncompiled(module) is not module:
        return module
    compiled: nn.Module = type(outer)(module, outer.dynamo_ctx)
    return compiled


def missing_name(name: str) -> str:
    """Return the way out for a name that ours lacks; "" for a name that Accelerate lacks, too."""
    if name in WITHOUT_PROCESSES:
        return f"drivetrain has no {name}: go on with 'from accelerate import {name}'"
    way = WAYS_OUT.get(name) or (f"{PLUGINS[name]}, {AS_IT_IS}" if name in PLUGINS else "")
    return f"drivetrain has no {name}: {way}" if way else ""


class AnswersArguments:
    """Answers arguments that Accelerate's Accelerator takes, and ours does not."""

    _lacking: ClassVar[Mapping[str, str]] = ARGUMENTS

    def __new__(cls, *args: Any, **arguments: Any) -> Self:
        """Refuse them with the way out.

        Raises:
            UsageError: such an argument was given.
        """
        for name in arguments.keys() & cls._lacking.keys():
            raise UsageError(
                f"expected arguments of drivetrain's Accelerator, found {name}: "
                f"{cls._lacking[name]}, {AS_IT_IS}"
            )
        return super().__new__(cls)
