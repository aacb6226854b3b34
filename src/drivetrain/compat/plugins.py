"""Accelerate's plugin objects and enums: the fields that scripts set and read."""

from collections.abc import Iterable
from contextlib import nullcontext
from enum import StrEnum
from typing import Any, ClassVar

from drivetrain.errors import UsageError


class DDPCommunicationHookType(StrEnum):
    """How gradients are compressed on the wire."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class PrecisionType(StrEnum):
    """Precisions of a run; fp8 is refused."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(StrEnum):
    """Names of experiment trackers."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class RNGType(StrEnum):
    """Random number generators that follow rank 0."""

    TORCH = "torch"
    CUDA = "cuda"
    XPU = "xpu"
    GENERATOR = "generator"


class DynamoBackend(StrEnum):
    """The best-known backends of ``torch.compile``."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"


class Plugin:
    """The given settings of a plugin object; all others are None.

    Attributes:
        order: names of positional arguments.
    """

    order: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *args: Any, **settings: Any) -> None:
        if len(args) > len(self.order):
            raise TypeError(
                f"{type(self).__name__} takes {len(self.order)} positional arguments, found "
                f"{len(args)}"
            )
        vars(self).update(zip(self.order, args, strict=False), **settings)

    def __getattr__(self, name: str) -> None:
        # Only called for settings that were not given.
        if name.startswith("_"):
            raise AttributeError(name)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class DeepSpeedPlugin(Plugin):
    """ZeRO, chosen by stage or by a DeepSpeed configuration."""

    order = ("hf_ds_config", "gradient_accumulation_steps", "gradient_clipping", "zero_stage")

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The given configuration; scripts look for an optimizer or a scheduler in it."""
        given = vars(self).get("hf_ds_config")
        return given if isinstance(given, dict) else {}

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are divided while they are made: never; see ``building()``."""
        return False

    def zero3_init_context_manager(self, enable: bool = False) -> Any:
        """Return a context without effect: models are divided by ``prepare()``."""
        del enable
        return nullcontext()


class FullyShardedDataParallelPlugin(Plugin):
    """Parameters divided over ranks."""

    order = ("fsdp_version", "sharding_strategy", "reshard_after_forward")


class MegatronLMPlugin(Plugin):
    """Tensor and pipeline parallelism."""

    order = ("tp_degree", "pp_degree")


class TorchTensorParallelPlugin(Plugin):
    """Tensor parallelism."""

    order = ("tp_size",)


class ParallelismConfig(Plugin):
    """Sizes of the axes."""

    order = ("dp_replicate_size", "dp_shard_size", "tp_size")


class TorchDynamoPlugin(Plugin):
    """How models are compiled."""

    order = ("backend", "mode", "fullgraph", "dynamic")


def refuse(plugins: Iterable[Plugin]) -> None:
    """Refuse plugin objects.

    Raises:
        UsageError: there is one.
    """
    for plugin in plugins:
        raise UsageError(
            f"expected the strategy from 'drivetrain launch --strategy NAME' or its configuration "
            f"file, found {plugin!r} in the script; docs/migrating-from-accelerate.md translates "
            "its settings"
        )
