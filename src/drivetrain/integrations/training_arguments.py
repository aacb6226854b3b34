"""The training arguments of transformers in our terms: engine, loaders and micro-batches."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import TorchDynamoPlugin  # type: ignore[import-untyped]
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from drivetrain.accelerator import Accelerator
from drivetrain.compat.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Plugin,
    translated,
)
from drivetrain.errors import UsageError
from drivetrain.facade.options import DataLoaderConfiguration
from drivetrain.log import get_logger

logger = get_logger(__name__)


def engine_of(args: Any) -> dict[str, Any]:
    """Return the strategy, and the further configuration, that training arguments choose.

    Arguments for DeepSpeed, FSDP and parallelism are translated as ``config import`` does; one line
    tells of each setting without counterpart.

    Returns:
        Arguments of the Accelerator; empty where the launch configuration chooses alone.

    Raises:
        UsageError: the arguments choose two engines, or a setting changes results.
        ConfigError: a setting is unknown, or contradicts another one.
    """
    plugins = engines_in(args)
    if not plugins:
        return {}
    found = translated(plugins)
    for remark in found.remarks:
        logger.announce(f"training arguments: {remark}")
    if args.deepspeed:
        # Else transformers asks DeepSpeed for a model's parameters.
        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    values = dict(found.values)
    return {"strategy": values.pop("strategy", None), "config": values or None}


def engines_in(args: Any) -> list[Plugin]:
    """Return the engines that training arguments choose, as plugin objects."""
    plugins: list[Plugin] = []
    if args.deepspeed:
        plugins.append(DeepSpeedPlugin(_deepspeed_values(args.deepspeed)))
    if args.fsdp_plugin_args:
        plugins.append(FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
    if args.parallelism_config:
        sizes = {k: v for k, v in vars(args.parallelism_config).items() if not k.startswith("_")}
        plugins.append(ParallelismConfig(**sizes))
    return plugins


def _deepspeed_values(given: Any) -> Mapping[str, Any]:
    """Return DeepSpeed's configuration, which the training arguments have or name a file of."""
    if isinstance(given, Mapping):
        return given
    values: dict[str, Any] = json.loads(Path(given).read_text(encoding="utf-8"))
    return values


def refuse_other_engines(args: Any, model: Any) -> None:
    """Refuse training arguments and models that a strategy cannot train with.

    Raises:
        UsageError: names the argument, and its counterpart.
    """
    if args.torch_compile:
        raise UsageError(
            "expected no torch_compile in the training arguments, found True; pass "
            "Trainer(model=torch.compile(model))"
        )
    if args.n_gpu > 1:
        raise UsageError(
            f"expected one GPU for each process, found {args.n_gpu} for one; start the script with "
            "'drivetrain launch'"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise UsageError(
            f"expected a whole model, found one divided over {model.tp_size} ranks by "
            "from_pretrained; leave out tp_plan, and choose tp in the strategy"
        )
    if model is not None and any(hasattr(one, "ds_id") for one in model.parameters()):
        raise UsageError(
            "expected a whole model, found one that deepspeed.zero.Init has divided; make the "
            "model before TrainingArguments(deepspeed=...)"
        )
    if getattr(args, "sync_ref_model", False):
        raise UsageError(
            "expected sync_ref_model=False, found True: the callback would copy parameters that "
            "ranks may divide; keep the reference model fixed"
        )


def loader_options(args: Any) -> DataLoaderConfiguration:
    """Return the training arguments' options of loaders, as far as they differ from the default."""
    given, usual = args.accelerator_config, type(args.accelerator_config)()
    names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
    options = {
        name: getattr(given, name)
        for name in (*names, "non_blocking")
        if getattr(given, name) != getattr(usual, name)
    }
    seed = args.seed if args.data_seed is None else args.data_seed
    return DataLoaderConfiguration(**options, data_seed=seed)


def accumulation_of(args: Any, configured: int) -> tuple[int, dict[str, Any]]:
    """Return the micro-batches per step, and the further options of accumulation.

    Args:
        args: the training arguments.
        configured: micro-batches per step in the launch configuration.

    Raises:
        UsageError: both say a number, and not the same.
    """
    more = dict(args.accelerator_config.gradient_accumulation_kwargs or {})
    given = {args.gradient_accumulation_steps, more.pop("num_steps", 1), configured}
    if len(given - {1}) > 1:
        raise UsageError(
            f"expected one number of micro-batches per step, found {sorted(given - {1})} in the "
            "training arguments and in accumulation of the launch configuration; keep one"
        )
    return max(given), more


def join(args: Any, accelerator: Accelerator) -> None:
    """Tell the training arguments about the other ranks, which they missed on the CPU.

    The state of Accelerate's own Accelerator is made, too: trainers and libraries ask it.
    """
    on_cpu = accelerator.device.type == "cpu"
    if args.distributed_state.num_processes != accelerator.num_processes:
        state = type(args.distributed_state)
        state._reset_state()
        args.distributed_state = state(cpu=on_cpu)
    AcceleratorState._reset_state()
    AcceleratorState(
        accelerator.mixed_precision,
        cpu=on_cpu,
        dynamo_plugin=TorchDynamoPlugin(),
        _from_accelerator=True,
    )
