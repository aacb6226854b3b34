"""The sections of Accelerate's files about divided layers: Megatron and parallel dimensions."""

from drivetrain_migration.draft import (
    WHOLE,
    Apply,
    Draft,
    Row,
    Setting,
    nothing,
    remark_above_one,
)
from drivetrain_migration.sharding import CLIP, NOT_HERE, recompute

MEGATRON, PARALLEL = "megatron_lm_config", "parallelism_config"
MEGATRON_PREFIX = f"{MEGATRON}.megatron_lm_"


def _degree(key: str) -> Apply:
    def apply(draft: Draft, setting: Setting) -> None:
        if setting.whole() > 1:
            draft.cell_option(key, setting.whole(), setting)

    return apply


def _with_degree(degree: str, key: str) -> Apply:
    """Return a function that copies a value where a degree is above 1."""

    def apply(draft: Draft, setting: Setting) -> None:
        if degree in draft.cell:
            value = setting.on if isinstance(setting.value, bool | str) else setting.whole()
            draft.cell_option(key, value, setting)

    return apply


def _distributed_optimizer(draft: Draft, setting: Setting) -> None:
    if setting.on:
        draft.option("name", "zero1", setting)


MEGATRON_ROWS: tuple[Row, ...] = (
    Row(f"{MEGATRON_PREFIX}tp_degree", "ranks that share every layer", "`tp`", _degree("tp")),
    Row(f"{MEGATRON_PREFIX}pp_degree", "stages of the pipeline", "`pp`", _degree("pp")),
    Row(
        f"{MEGATRON_PREFIX}num_micro_batches",
        "parts of a batch",
        "`micro_batches`",
        _with_degree("pp", "micro_batches"),
    ),
    Row(
        f"{MEGATRON_PREFIX}sequence_parallelism",
        "divides norms and dropouts by tokens",
        "`sequence_parallel`",
        _with_degree("tp", "sequence_parallel"),
    ),
    Row(
        f"{MEGATRON_PREFIX}recompute_activations",
        "recomputes attention in backward",
        "`recompute: {mode: selective}`",
        recompute("selective"),
    ),
    Row(
        f"{MEGATRON_PREFIX}use_distributed_optimizer",
        "divides optimizer states",
        "`data_parallel: {name: zero1}`",
        _distributed_optimizer,
    ),
    Row(f"{MEGATRON_PREFIX}gradient_clipping", "clips the norm of gradients", CLIP),
    *(
        Row(
            f"{MEGATRON_PREFIX}{key}",
            "ranks that share more",
            NOT_HERE,
            remark_above_one("ranks that share sequences or experts", NOT_HERE),
        )
        for key in (
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )
    ),
    *(
        Row(f"{MEGATRON_PREFIX}{key}", "how blocks are recomputed", "`recompute`")
        for key in ("recompute_granularity", "recompute_method", "recompute_num_layers")
    ),
    *(
        Row(f"{MEGATRON_PREFIX}{key}", "a setting of Megatron's own model", "the script's model")
        for key in (
            "attention_backend",
            "attention_dropout",
            "hidden_dropout",
            "attention_softmax_in_fp32",
            "calculate_per_token_loss",
            "use_rotary_position_embeddings",
            "eod_mask_loss",
            "decoder_last_pipeline_num_layers",
        )
    ),
    *(
        Row(
            f"{MEGATRON_PREFIX}{key}",
            "optimizer states in host memory",
            "`data_parallel: {name: zero1, offload: {optimizer: cpu}}`",
        )
        for key in (
            "optimizer_cpu_offload",
            "overlap_cpu_optimizer_d2h_h2d",
            "use_precision_aware_optimizer",
        )
    ),
    Row(f"{MEGATRON_PREFIX}use_custom_fsdp", "Megatron's FSDP", "`data_parallel: fsdp`"),
    *(
        Row(f"{MEGATRON_PREFIX}{key}", "contents of checkpoints", "all of the state")
        for key in ("no_load_optim", "no_save_optim")
    ),
)

_PREFIX = f"{PARALLEL}.parallelism_config_"
_SHARE_SEQUENCE = "ranks that share a sequence"


def _replicas(draft: Draft, setting: Setting) -> None:
    shards = draft.value(f"{_PREFIX}dp_shard_size") or 1
    if setting.whole() == 1:
        return
    if shards == 1:
        draft.strategy.clear()
        draft.option("name", WHOLE, setting)
    else:
        draft.option("sharding", "hybrid", setting)
        draft.option("shard_size", shards, draft.given[f"{_PREFIX}dp_shard_size"])


PARALLEL_ROWS: tuple[Row, ...] = (
    Row(f"{_PREFIX}tp_size", "ranks that share every layer", "`megatron`, `tp`", _degree("tp")),
    Row(
        f"{_PREFIX}dp_replicate_size",
        "replicas of groups that divide the model",
        "`sharding: hybrid`; `ddp` where no group divides the model",
        _replicas,
    ),
    Row(f"{_PREFIX}dp_shard_size", "ranks that divide the model", "`shard_size`", nothing),
    *(
        Row(
            f"{_PREFIX}{key}",
            _SHARE_SEQUENCE,
            NOT_HERE,
            remark_above_one(_SHARE_SEQUENCE, NOT_HERE),
        )
        for key in ("cp_size", "sp_size")
    ),
    *(
        Row(f"{_PREFIX}{key}", "how ranks share a sequence", NOT_HERE)
        for key in (
            "cp_backend",
            "cp_comm_strategy",
            "sp_backend",
            "sp_seq_length",
            "sp_seq_length_is_variable",
            "sp_attn_implementation",
        )
    ),
)
