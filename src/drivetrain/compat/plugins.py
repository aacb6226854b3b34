"""Accelerate's plugin objects and enums, and the strategy that plugin objects choose.

A plugin object says the same as a section of Accelerate's configuration file, so the importer of
these files translates both.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.config import Layer, ValueOrigin
from drivetrain.config.document import Importer, Translation
from drivetrain.errors import UsageError
from drivetrain.registry import formats
from drivetrain.runtime.world import variables

PrecisionType = StrEnum("PrecisionType", ["NO", "FP8", "FP16", "BF16"], module=__name__)
"""Precisions of a run; fp8 is refused."""

RNGType = StrEnum("RNGType", ["TORCH", "CUDA", "XPU", "GENERATOR"], module=__name__)
"""Random number generators that follow rank 0."""


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
        kind: ``distributed_type`` of a configuration file that says the same.
        section: of the settings in this file.
        prefix: of their names there.
        renamed: names in the file that differ by more than the prefix.
        needless: settings without effect on results.
        refused: settings that change results, and the way to have the same here.
    """

    order: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str] = ""
    section: ClassVar[str] = ""
    prefix: ClassVar[str] = ""
    renamed: ClassVar[Mapping[str, str]] = {}
    needless: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, str]] = {}

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

    def as_file(self) -> dict[str, Any]:
        """Return the values of a configuration file of Accelerate that says the same.

        Raises:
            UsageError: a setting has no counterpart, and changes what a run computes.
        """
        section = {}
        for name, value in self.settings().items():
            if value is None or name in self.needless:
                continue
            if name in self.refused:
                raise UsageError(
                    f"expected no {name} in {type(self).__name__}, found {value!r}; "
                    f"{self.refused[name]}"
                )
            section[self.renamed.get(name, f"{self.prefix}{name}")] = plain_value(value)
        kind = {"distributed_type": self.kind} if self.kind else {}
        return {**kind, self.section: section}

    def settings(self) -> dict[str, Any]:
        """Return the settings in words of a file, as far as they are none already."""
        return dict(vars(self))


class DeepSpeedPlugin(Plugin):
    """ZeRO, chosen by stage or by a DeepSpeed configuration."""

    order = ("hf_ds_config", "gradient_accumulation_steps", "gradient_clipping", "zero_stage")
    kind, section = "DEEPSPEED", "deepspeed_config"
    renamed = {"hf_ds_config": "deepspeed_config_file"}  # noqa: RUF012
    needless = frozenset({"is_train_batch_min", "msamp_opt_level", "transformer_moe_cls_names"})
    refused = {"enable_msamp": "no fp8 here; mixed_precision='bf16' is the nearest"}  # noqa: RUF012

    USUAL_STAGE: ClassVar[int] = 2
    """The stage of a plugin that names none."""

    def settings(self) -> dict[str, Any]:
        """Return the settings, with the stage that Accelerate takes."""
        given = dict(vars(self))
        if given.get("hf_ds_config") is None and given.get("zero_stage") is None:
            given["zero_stage"] = self.USUAL_STAGE
        if not given.get("enable_msamp"):
            given.pop("enable_msamp", None)
        return given

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
    kind, section, prefix = "FSDP", "fsdp_config", "fsdp_"
    renamed = {  # noqa: RUF012
        "fsdp_version": "fsdp_version",
        "cpu_offload": "fsdp_offload_params",
        "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    }
    needless = frozenset(
        {"limit_all_gathers", "state_dict_config", "optim_state_dict_config", "param_init_fn"}
    )
    refused = {  # noqa: RUF012
        "ignored_modules": "every parameter is divided",
        "mixed_precision_policy": "pass mixed_precision to the Accelerator, and set dtypes in the "
        "launch configuration",
    }

    def settings(self) -> dict[str, Any]:
        """Return the settings, with the classes or the size of a policy that is a function."""
        given = dict(vars(self))
        policy = given.get("auto_wrap_policy")
        if callable(policy):
            options = getattr(policy, "keywords", {})
            given.pop("auto_wrap_policy")
            if "transformer_layer_cls" in options:
                names = (each.__name__ for each in options["transformer_layer_cls"])
                given["transformer_cls_names_to_wrap"] = ",".join(sorted(names))
            elif "min_num_params" in options:
                given["auto_wrap_policy"] = "SIZE_BASED_WRAP"
                given["min_num_params"] = options["min_num_params"]
        if not given.get("ignored_modules"):
            given.pop("ignored_modules", None)
        return given


class MegatronLMPlugin(Plugin):
    """Tensor and pipeline parallelism."""

    order = ("tp_degree", "pp_degree")
    kind, section, prefix = "MEGATRON_LM", "megatron_lm_config", "megatron_lm_"


class TorchTensorParallelPlugin(Plugin):
    """Tensor parallelism."""

    order = ("tp_size",)
    section, prefix = "parallelism_config", "parallelism_config_"
    needless = frozenset({"torch_device_mesh"})


class ParallelismConfig(Plugin):
    """Sizes of the axes.

    A size that is not given comes from the environment variables of Accelerate's launcher, or is 1.
    """

    order = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size")
    section, prefix = "parallelism_config", "parallelism_config_"
    needless = frozenset({"cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler"})

    refused = dict.fromkeys(
        ("cp_size", "sp_size"),
        "no ranks share a sequence here, so each would get a batch of its own; leave it at 1, and "
        "take tp_size or dp_shard_size, or recompute",
    )

    AXES: ClassVar[tuple[str, ...]] = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
    """From the ranks that are farthest from each other to the nearest."""

    PRODUCTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "data_parallel_size": ("dp_replicate", "dp_shard"),
        "non_data_parallel_size": ("tp", "cp", "sp"),
        "total_size": AXES,
    }
    """Properties that are the number of ranks along axes."""

    DIMS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dp_dim_names": ("dp_replicate", "dp_shard"),
        "non_dp_dim_names": ("tp", "cp", "sp"),
        "dp_shard_cp_dim_names": ("dp_shard", "cp"),
        "dp_cp_dim_names": ("dp_replicate", "dp_shard", "cp"),
        "active_mesh_dims": ("dp_replicate", "dp_shard", "tp", "cp", "sp"),
    }
    """Properties that are those of some axes with more than one rank."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        launched = variables("PARALLELISM_CONFIG_")
        for key in (f"{axis}_size" for axis in self.AXES):
            if vars(self).get(key) is None:
                vars(self)[key] = int(launched.get(key.upper(), "1"))

    def settings(self) -> dict[str, Any]:
        """Return the settings without axes of one rank that are refused with more."""
        return {k: v for k, v in vars(self).items() if k not in self.refused or v != 1}

    def __getattr__(self, name: str) -> Any:
        if name in self.PRODUCTS:
            return self._product(*self.PRODUCTS[name])
        if name in self.DIMS:
            return self._enabled(*self.DIMS[name])
        axis = name.removesuffix("_enabled")
        return bool(self._enabled(axis)) if name != axis else super().__getattr__(name)

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axis of replicas, if there are any, and the joint axis that divides parameters."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return torch's mesh of these axes, with joint axes; None if all have one rank.

        It is for the script's own use: the strategy makes its groups itself.
        """
        names = tuple(self._enabled(*self.AXES))
        if not names:
            return None
        shape = tuple(self._product(name) for name in names)
        mesh = device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)
        for name in ("dp", "dp_shard_cp", "dp_cp"):
            if axes := self._enabled(*self.DIMS[f"{name}_dim_names"]):
                mesh[axes]._flatten(name)  # type: ignore[index]  # torch takes any sequence
        return mesh

    def _enabled(self, *axes: str) -> list[str]:
        return [axis for axis in axes if axis in self.AXES and self._product(axis) > 1]

    def _product(self, *axes: str) -> int:
        return math.prod(vars(self)[f"{axis}_size"] for axis in axes)


class TorchDynamoPlugin(Plugin):
    """How models are compiled."""

    order = ("backend", "mode", "fullgraph", "dynamic")


def translated(plugins: Sequence[Plugin]) -> Translation:
    """Return the strategy and further settings of plugin objects, as their file is imported.

    Raises:
        UsageError: a setting has no counterpart, or two plugins choose different engines.
        ConfigError: a setting is unknown, or contradicts another one.
    """
    kinds = {plugin.kind for plugin in plugins if plugin.kind}
    if len(kinds) > 1:
        raise UsageError(f"expected a plugin object of one engine, found {sorted(kinds)}; keep one")
    values: dict[str, Any] = {}
    for plugin in plugins:
        values |= plugin.as_file()
    given = ", ".join(map(repr, plugins))
    origins = {key: ValueOrigin("code", given) for key in values}
    config = values.get("deepspeed_config", {}).get("deepspeed_config_file")
    if isinstance(config, Mapping):
        return _importer("deepspeed").translate(
            Layer(config, {key: ValueOrigin("code", given) for key in config}), Path.cwd()
        )
    return _importer("accelerate").translate(Layer(values, origins), Path.cwd())


def _importer(program: str) -> Importer:
    importer: Importer = formats().load(program)()
    return importer


def plain_value(value: Any) -> Any:
    """Return a setting as a file has it: an enum's name, an offload object's answer."""
    if isinstance(value, Enum):
        return value.name
    return getattr(value, "offload_params", value)
