"""DeepSpeed's JSON: a table of its settings and of our counterparts."""

from drivetrain.config import Layer
from drivetrain.errors import ConfigError
from drivetrain_migration.draft import (
    WHOLE,
    Draft,
    Row,
    remark_above_one,
    remark_if_on,
    settings,
    to,
)
from drivetrain_migration.zero import (
    MIB,
    ZERO,
    check_batch,
    check_path,
    old_offload,
    set_bucket,
    set_cpu_checkpointing,
    set_groups,
    set_layers,
    set_mics,
    set_offload,
    set_path,
    set_precision,
    set_ratio,
    set_stage,
    set_threads,
    set_wire,
    stage_3_option,
    store_option,
)

_LOOP = "`accelerator.clip_grad_norm_(model.parameters(), VALUE)` in the loop"
_NOT_HERE = "not here"
_ALWAYS = "always"
_SCRIPT_OPTIMIZER = "make it in the script, and pass it to `accelerator.prepare`"
_SCALER = "`Accelerator(kwargs_handlers=[GradScalerKwargs(...)])`"

ROWS: tuple[Row, ...] = (
    Row(f"{ZERO}.stage", "which states are divided", "`ddp`, `zero1`, `zero2`, `zero3`", set_stage),
    Row(
        "bf16.enabled",
        "bf16 parameters with fp32 masters",
        "`precision: bf16`, and `dtypes: {param: bf16}` but under `ddp`",
        set_precision("bf16"),
    ),
    Row(
        "fp16.enabled",
        "fp16 parameters with fp32 masters and a loss scale",
        "`precision: fp16`, and `dtypes: {param: fp16}` but under `ddp`",
        set_precision("fp16"),
    ),
    Row("fp16.loss_scale", "the scale of the loss; 0 finds it", f"found; {_SCALER}"),
    Row("fp16.initial_scale_power", "the first scale is 2 to this power", _SCALER),
    Row("fp16.loss_scale_window", "good steps until the scale grows", _SCALER),
    Row("fp16.hysteresis", "bad steps until the scale shrinks", _SCALER),
    Row("fp16.consecutive_hysteresis", "whether bad steps must be consecutive", _ALWAYS),
    Row("fp16.min_loss_scale", "the smallest scale", _SCALER),
    Row("fp16.auto_cast", "casts inputs to fp16", "autocast does"),
    Row("fp16.fp16_master_weights_and_grads", "no fp32 masters", "fp16 needs masters"),
    Row("bf16.immediate_grad_update", "when gradients are added to fp32 sums", "at once"),
    Row("bf16.check_grad_overflow", "looks for infinite gradients", "none are skipped in bf16"),
    Row("amp.*", "mixed precision by Apex", "`precision`"),
    Row("torch_autocast.*", "mixed precision by autocast", "`precision`"),
    Row(
        "gradient_accumulation_steps",
        "micro-batches per optimizer step",
        "`accumulation`",
        to("accumulation"),
    ),
    Row("train_batch_size", "samples of all ranks in one step", "the script's loader", check_batch),
    Row("train_micro_batch_size_per_gpu", "samples of a micro-batch", "the loader's `batch_size`"),
    Row("gradient_clipping", "clips the norm of gradients in every step", _LOOP),
    Row("communication_data_type", "dtype of gradients on the wire", "`dtypes.reduce`", set_wire),
    Row("data_types.*", "dtype of summed gradients", "fp32"),
    Row("optimizer.*", "the optimizer that DeepSpeed makes", _SCRIPT_OPTIMIZER),
    Row("scheduler.*", "the schedule of the learning rate that DeepSpeed makes", _SCRIPT_OPTIMIZER),
    Row(
        f"{ZERO}.offload_optimizer.device",
        "where optimizer state lies",
        "`offload: {optimizer: cpu}`, `nvme`",
        set_offload("optimizer", 1),
    ),
    Row(
        f"{ZERO}.offload_param.device",
        "where parameters lie",
        "`offload: {params: cpu}`, `nvme`",
        set_offload("params", 3),
    ),
    Row(
        f"{ZERO}.offload_optimizer.nvme_path",
        "directory on a disk",
        "`offload: {path: DIR}`",
        set_path(f"{ZERO}.offload_optimizer.device"),
    ),
    Row(
        f"{ZERO}.offload_param.nvme_path",
        "directory on a disk",
        "`offload: {path: DIR}`, one for both",
        set_path(f"{ZERO}.offload_param.device"),
    ),
    Row(
        f"{ZERO}.offload_optimizer.ratio",
        "share of the state that is offloaded",
        "`offload: {ratio: 0.9}`",
        set_ratio,
    ),
    Row(
        f"{ZERO}.offload_optimizer.pin_memory",
        "page-locked host memory",
        "`store_options: {page_locked: true}`",
        store_option("page_locked", "cpu"),
    ),
    Row(f"{ZERO}.offload_param.pin_memory", "page-locked host memory", "as for the optimizer"),
    *(
        Row(f"{ZERO}.offload_optimizer.{key}", "buffers of the pipeline", "not needed")
        for key in (
            "buffer_count",
            "buffer_size",
            "fast_init",
            "pipeline",
            "pipeline_read",
            "pipeline_write",
            "super_offload",
            "cpuadam_cores_perc",
        )
    ),
    *(
        Row(
            f"{ZERO}.offload_param.{key}",
            "buffers of parameters",
            "`store_options: {staging_mib: 256}` for writes, `prefetch` for reads ahead",
        )
        for key in ("buffer_count", "buffer_size", "max_in_cpu")
    ),
    Row(
        "aio.block_size",
        "bytes of a request to the disk",
        "`store_options: {request_mib: 4}`",
        store_option("request_mib", "nvme", MIB),
    ),
    Row("aio.queue_depth", "requests in flight", "`store_options: {threads: 8}`", set_threads),
    Row("aio.thread_count", "threads of requests", "`store_options: {threads: 8}`", set_threads),
    Row(
        "aio.intra_op_parallelism",
        "threads of requests",
        "`store_options: {threads: 8}`",
        set_threads,
    ),
    Row("aio.single_submit", "how requests are handed over", _NOT_HERE),
    Row("aio.overlap_events", "how requests are waited for", _NOT_HERE),
    Row("aio.use_gds", "from the disk to the GPU directly", _NOT_HERE),
    Row(
        f"{ZERO}.reduce_bucket_size",
        "elements reduced together",
        "`bucket_mib`, in MiB",
        set_bucket,
    ),
    Row(f"{ZERO}.allgather_bucket_size", "elements gathered together", "`bucket_mib`"),
    *(
        Row(f"{ZERO}.{key}", "a faster way of sending", _ALWAYS)
        for key in (
            "overlap_comm",
            "contiguous_gradients",
            "reduce_scatter",
            "allgather_partitions",
            "round_robin_gradients",
            "use_multi_rank_bucket_allreduce",
        )
    ),
    Row(f"{ZERO}.sub_group_size", "elements of one update", "not needed: tiles"),
    *(
        Row(f"{ZERO}.{key}", "elements gathered ahead, or kept whole", "`prefetch`, in units")
        for key in (
            "stage3_prefetch_bucket_size",
            "prefetch_bucket_size",
            "stage3_max_live_parameters",
            "max_live_parameters",
            "stage3_max_reuse_distance",
            "max_reuse_distance",
        )
    ),
    *(
        Row(
            f"{ZERO}.{key}",
            "smaller parameters stay whole",
            "`keep_below`",
            stage_3_option("keep_below"),
        )
        for key in ("stage3_param_persistence_threshold", "param_persistence_threshold")
    ),
    Row(f"{ZERO}.stage3_model_persistence_threshold", "most elements kept whole", "`keep_below`"),
    *(
        Row(
            f"{ZERO}.{key}",
            "whole weights in saved models",
            "`accelerator.save_model`, `drivetrain checkpoint export`: always whole",
        )
        for key in (
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        )
    ),
    Row(
        f"{ZERO}.zero_hpz_partition_size",
        "ranks that keep a copy of the parameters until backward",
        "`{name: zero3, reshard_after_forward: k}`",
        set_groups,
    ),
    Row(
        f"{ZERO}.mics_shard_size",
        "ranks that divide the model, with replicas between groups",
        "`{name: fsdp, sharding: hybrid, shard_size: k}`",
        set_mics,
    ),
    Row(f"{ZERO}.mics_hierarchical_params_gather", "gathers in two steps", _NOT_HERE),
    *(
        Row(
            f"{ZERO}.{key}",
            "quantized parameters or gradients on the wire",
            _NOT_HERE,
            remark_if_on("quantized parameters or gradients on the wire", _NOT_HERE),
        )
        for key in (
            "zero_quantized_weights",
            "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights",
        )
    ),
    *(
        Row(f"{ZERO}.{key}", "how DeepSpeed works inside", "not needed")
        for key in (
            "elastic_checkpoint",
            "ignore_unused_parameters",
            "legacy_stage1",
            "load_from_fp32_weights",
            "memory_efficient_linear",
            "module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "use_all_reduce_for_fetch_params",
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
        )
    ),
    Row(f"{ZERO}.leaf_module.*", "modules gathered as one", "`units: class` of `fsdp`"),
    Row(f"{ZERO}.zenflow.*", "updates of the important gradients first", _NOT_HERE),
    Row(
        f"{ZERO}.cpu_offload",
        "as offload_optimizer",
        "`offload: {optimizer: cpu}`",
        old_offload("optimizer", 1),
    ),
    *(
        Row(
            f"{ZERO}.{key}",
            "as offload_param",
            "`offload: {params: cpu}`",
            old_offload("params", 3),
        )
        for key in ("cpu_offload_params", "cpu_offload_param")
    ),
    Row(f"{ZERO}.cpu_offload_use_pin_memory", "page-locked host memory", "`page_locked`"),
    Row(
        "activation_checkpointing.cpu_checkpointing",
        "inputs of recomputed blocks wait in host memory",
        "`recompute: {mode: full, keep: cpu}`",
        set_cpu_checkpointing,
    ),
    *(
        Row(
            f"activation_checkpointing.{key}",
            "how `deepspeed.checkpointing.checkpoint` recomputes",
            "`recompute`",
            remark_if_on("how deepspeed.checkpointing.checkpoint recomputes", "`recompute`"),
        )
        for key in (
            "partition_activations",
            "contiguous_memory_optimization",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    ),
    Row(
        "tensor_parallel.autotp_size",
        "ranks that share every layer",
        "`megatron`, `tp`",
        set_layers,
    ),
    Row("tensor_parallel.preset_model", "which layers are divided", "`plan` of `megatron`"),
    Row("tensor_parallel.tensor_parallel.*", "which layers are divided", "`plan` of `megatron`"),
    Row(
        "sequence_parallel_size",
        "ranks that share a sequence",
        _NOT_HERE,
        remark_above_one("ranks that share a sequence", _NOT_HERE),
    ),
    Row("pipeline.*", "the pipeline of `deepspeed.pipe`", "`pp` of `megatron`"),
    *(
        Row(key, "which optimizers are taken", "any optimizer of torch")
        for key in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
    ),
    *(
        Row(key, "scales gradients around the reduction", "the mean, always")
        for key in ("prescale_gradients", "gradient_predivide_factor")
    ),
    Row("sparse_gradients", "sends gradients of embeddings as rows", "gradients are dense"),
    Row("disable_allgather", "another collective for parameters", _NOT_HERE),
    *(
        Row(key, "output while it trains", "trackers: `accelerator.init_trackers`")
        for key in ("steps_per_print", "dump_state", "wall_clock_breakdown", "memory_breakdown")
    ),
    *(
        Row(f"{key}.*", "logs metrics of its own", "`Accelerator(log_with=...)`")
        for key in ("tensorboard", "wandb", "csv_monitor", "comet")
    ),
    Row("comms_logger.*", "counts messages", "`accelerator.traffic`"),
    Row(
        "flops_profiler.*",
        "counts operations of modules",
        "`--profile STEPS`, or `accelerator.profile` with `with_flops=True`",
    ),
    Row("checkpoint.*", "how checkpoints are written", "`save_state`: one format"),
    Row("checkpoint_tag_validation", "compares names of checkpoints", _ALWAYS),
    Row("use_node_local_storage", "checkpoints on each host", _NOT_HERE),
    Row("dataloader_drop_last", "drops the last batch", "`DataLoader(drop_last=True)`"),
    Row("seed", "seed of the order of samples", "`seed`", to("seed")),
    Row("compile.*", "torch.compile", "`torch.compile` in the script"),
    *(
        Row(f"{key}.*", "a feature of DeepSpeed alone", _NOT_HERE)
        for key in (
            "autotuning",
            "elasticity",
            "data_efficiency",
            "curriculum_learning",
            "progressive_layer_drop",
            "eigenvalue",
            "compression_training",
            "sparse_attention",
            "hybrid_engine",
            "nebula",
            "quantize_training",
        )
    ),
)


def draft_of(layer: Layer) -> Draft:
    """Return the draft of a JSON file with every row applied.

    Raises:
        ConfigError: a key is unknown, or settings contradict each other.
    """
    draft = Draft(settings(layer, ROWS))
    _refuse_two_precisions(draft)
    if f"{ZERO}.stage" not in draft.given:
        draft.strategy["name"] = WHOLE
    draft.apply(ROWS)
    for section in ("offload_optimizer", "offload_param"):
        device = draft.given.get(f"{ZERO}.{section}.device")
        if device is not None:
            check_path(draft, device)
    return draft


def _refuse_two_precisions(draft: Draft) -> None:
    low = [draft.given[key] for key in ("bf16.enabled", "fp16.enabled") if draft.value(key) is True]
    if len(low) > 1:
        raise ConfigError(
            f"{low[1].where}: {low[0]} and {low[1]} contradict each other; keep one of them"
        )
