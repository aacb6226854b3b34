"""The sections of Accelerate's files about divided states: DeepSpeed and FSDP."""

from drivetrain_migration.draft import (
    WHOLE,
    Apply,
    Draft,
    Row,
    Setting,
    nothing,
    remark_if_on,
    to,
)
from drivetrain_migration.zero import set_offload, set_path, set_stage

DEEPSPEED, FSDP = "deepspeed_config", "fsdp_config"
LARGER_THAN_ANY_MODEL = 10**15
"""Elements from which a module is a unit, where none shall be."""

FSDP_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Names of ``fsdp_sharding_strategy``; older files have their numbers from 1."""

CLIP = "`accelerator.clip_grad_norm_(model.parameters(), VALUE)` in the loop"
ALWAYS, NOT_HERE = "always", "not here"
_SAVE = "`accelerator.save_model`, `drivetrain checkpoint export`: always whole"
_BUILD = "`with accelerator.building(weights=PATH):` around the model"

DEEPSPEED_ROWS: tuple[Row, ...] = (
    Row(
        f"{DEEPSPEED}.zero_stage",
        "which states are divided",
        "`ddp`, `zero1`, `zero2`, `zero3`",
        set_stage,
    ),
    Row(
        f"{DEEPSPEED}.gradient_accumulation_steps",
        "micro-batches per optimizer step",
        "`accumulation`",
        to("accumulation"),
    ),
    Row(f"{DEEPSPEED}.gradient_clipping", "clips the norm of gradients in every step", CLIP),
    Row(
        f"{DEEPSPEED}.offload_optimizer_device",
        "where optimizer state lies",
        "`offload: {optimizer: cpu}`, `nvme`",
        set_offload("optimizer", 1),
    ),
    Row(
        f"{DEEPSPEED}.offload_param_device",
        "where parameters lie",
        "`offload: {params: cpu}`, `nvme`",
        set_offload("params", 3),
    ),
    Row(
        f"{DEEPSPEED}.offload_optimizer_nvme_path",
        "directory on a disk",
        "`offload: {path: DIR}`",
        set_path(f"{DEEPSPEED}.offload_optimizer_device"),
    ),
    Row(
        f"{DEEPSPEED}.offload_param_nvme_path",
        "directory on a disk",
        "`offload: {path: DIR}`, one for both",
        set_path(f"{DEEPSPEED}.offload_param_device"),
    ),
    Row(
        f"{DEEPSPEED}.zero3_init_flag",
        "divides parameters while the model is made",
        "`with accelerator.building():` around the model",
        remark_if_on(
            "divides parameters while the model is made",
            "with accelerator.building(): around the model",
        ),
    ),
    Row(f"{DEEPSPEED}.zero3_save_16bit_model", "whole weights in saved models", _SAVE),
    Row(f"{DEEPSPEED}.deepspeed_config_file", "a file of DeepSpeed", "imported", nothing),
    Row(f"{DEEPSPEED}.deepspeed_hostfile", "hosts reached by ssh", "start it on every host"),
    Row(f"{DEEPSPEED}.deepspeed_multinode_launcher", "how hosts are reached", "by hand", nothing),
    Row(f"{DEEPSPEED}.deepspeed_inclusion_filter", "devices", "`CUDA_VISIBLE_DEVICES`"),
    Row(f"{DEEPSPEED}.deepspeed_exclusion_filter", "devices", "`CUDA_VISIBLE_DEVICES`"),
    Row(
        f"{DEEPSPEED}.deepspeed_moe_layer_cls_names",
        "modules gathered as one",
        "found: blocks that repeat",
    ),
)

FILE_EXCLUDES = tuple(
    f"{DEEPSPEED}.{key}"
    for key in (
        "zero_stage",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_optimizer_nvme_path",
        "offload_param_nvme_path",
        "zero3_save_16bit_model",
    )
)
"""Keys that Accelerate refuses beside a file of DeepSpeed, which has them itself."""


def _sharding(draft: Draft, setting: Setting) -> None:
    """Carry over a strategy of FSDP1, which newer files call ``fsdp_reshard_after_forward``."""
    word = str(setting.value).upper()
    word = FSDP_STRATEGIES[int(word) - 1] if word in {"1", "2", "3", "4", "5"} else word
    if draft.name == WHOLE:
        return
    if word in {"TRUE", "FALSE"}:
        if word == "FALSE":
            draft.option("reshard_after_forward", False, setting)
        return
    if word.isdecimal():
        draft.option("reshard_after_forward", int(word), setting)
        return
    if word not in FSDP_STRATEGIES:
        raise setting.wrong(
            f"true, false, a number of ranks, or one of {', '.join(FSDP_STRATEGIES)}"
        )
    if word == "NO_SHARD":
        draft.strategy.clear()
        draft.option("name", WHOLE, setting)
    if word.startswith("HYBRID"):
        draft.option("sharding", "hybrid", setting)
    if word in {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"}:
        draft.option("reshard_after_forward", False, setting)


def _divided(apply: Apply) -> Apply:
    """Return a function that carries a value over, unless the model stays whole."""

    def applied(draft: Draft, setting: Setting) -> None:
        if draft.name == WHOLE:
            draft.remark(setting, "no effect on a whole model", "no effect")
        else:
            apply(draft, setting)

    return applied


def _wrap_policy(draft: Draft, setting: Setting) -> None:
    word = str(setting.value).upper()
    if word == "NO_WRAP":
        draft.option("units", "size", setting)
        draft.option("unit_from", LARGER_THAN_ANY_MODEL, setting)
    elif word == "SIZE_BASED_WRAP":
        draft.option("units", "size", setting)
    elif word != "TRANSFORMER_BASED_WRAP":
        raise setting.wrong("TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP")


def _unit_classes(draft: Draft, setting: Setting) -> None:
    if not setting.absent and draft.strategy.get("units") is None:
        names = setting.value if isinstance(setting.value, str) else ",".join(setting.value)
        draft.option("units", "class", setting)
        draft.option("unit_classes", names, setting)


def _unit_from(draft: Draft, setting: Setting) -> None:
    if draft.strategy.get("units") == "size" and "unit_from" not in draft.strategy:
        draft.option("unit_from", max(1, setting.whole(minimum=0)), setting)


def _prefetch(draft: Draft, setting: Setting) -> None:
    if setting.absent or setting.value == "NO_PREFETCH":
        draft.option("live_units", 1, setting)
    elif setting.value == "BACKWARD_POST":
        draft.remark(setting, "gathers a unit after the one before was freed", "live_units: 2")


def _offload(draft: Draft, setting: Setting) -> None:
    if setting.on:
        draft.option("offload.optimizer", "cpu", setting)
        draft.option("offload.params", "cpu", setting)


def recompute(mode: str) -> Apply:
    """Return a function that turns recomputation on."""

    def apply(draft: Draft, setting: Setting) -> None:
        if setting.on:
            draft.set("recompute.mode", mode, setting)

    return apply


def _recompute_offload(draft: Draft, setting: Setting) -> None:
    if setting.on:
        draft.set("recompute.mode", "full", setting)
        draft.set("recompute.keep", "cpu", setting)


FSDP_ROWS: tuple[Row, ...] = (
    Row(f"{FSDP}.fsdp_version", "which FSDP of torch", "`fsdp`: there is one", nothing),
    Row(
        f"{FSDP}.fsdp_sharding_strategy",
        "which states are divided",
        "`FULL_SHARD`: `fsdp`; `SHARD_GRAD_OP`: `reshard_after_forward: false`; `HYBRID_SHARD`: "
        "`sharding: hybrid`; `NO_SHARD`: `ddp`",
        _sharding,
    ),
    Row(
        f"{FSDP}.fsdp_reshard_after_forward",
        "whether units are freed after forward",
        "`reshard_after_forward`",
        _sharding,
    ),
    Row(
        f"{FSDP}.fsdp_auto_wrap_policy",
        "how units are found",
        "`TRANSFORMER_BASED_WRAP`: `units: auto` or `class`; `SIZE_BASED_WRAP`: `units: size`; "
        "`NO_WRAP`: `unit_from` larger than the model",
        _divided(_wrap_policy),
    ),
    Row(
        f"{FSDP}.fsdp_transformer_layer_cls_to_wrap",
        "classes of units",
        "`units: class`, `unit_classes`",
        _divided(_unit_classes),
    ),
    Row(
        f"{FSDP}.fsdp_min_num_params",
        "elements of a unit",
        "`units: size`, `unit_from`",
        _divided(_unit_from),
    ),
    *(
        Row(
            f"{FSDP}.{key}",
            "units gathered ahead in backward",
            "`live_units`; `NO_PREFETCH` is 1",
            _divided(_prefetch),
        )
        for key in ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy")
    ),
    Row(f"{FSDP}.fsdp_forward_prefetch", "units gathered ahead", "`live_units`: 2", nothing),
    Row(f"{FSDP}.fsdp_state_dict_type", "format of checkpoints", "the same for all strategies"),
    Row(
        f"{FSDP}.fsdp_offload_params",
        "where parameters and states lie",
        "`offload: {optimizer: cpu, params: cpu}`",
        _divided(_offload),
    ),
    Row(
        f"{FSDP}.fsdp_cpu_ram_efficient_loading",
        "weights are read by rank 0 alone",
        _BUILD,
        remark_if_on("weights are read by rank 0 alone", _BUILD),
    ),
    Row(f"{FSDP}.fsdp_sync_module_states", "ranks start with rank 0's values", ALWAYS, nothing),
    Row(f"{FSDP}.fsdp_use_orig_params", "parameters stay objects of the model", ALWAYS, nothing),
    Row(
        f"{FSDP}.fsdp_activation_checkpointing",
        "recomputes blocks in backward",
        "`recompute: {mode: full}`",
        recompute("full"),
    ),
    Row(
        f"{FSDP}.fsdp_activation_checkpointing_offload",
        "inputs of recomputed blocks wait in host memory",
        "`recompute: {mode: full, keep: cpu}`",
        _recompute_offload,
    ),
    Row(f"{FSDP}.fsdp_ignored_modules", "modules that stay whole", NOT_HERE),
)
