"""The settings of DeepSpeed's ZeRO carried over, for its own files and for those of Accelerate."""

from drivetrain.errors import ConfigError
from drivetrain_migration.draft import WHOLE, Apply, Draft, Setting

STAGES = (WHOLE, "zero1", "zero2", "zero3")
"""The strategy of each ZeRO stage."""

MIB = 1 << 20
FP32_BYTES, LOW_BYTES = 4, 2
LARGEST_BUCKET_MIB = 4096
"""The largest ``bucket_mib`` that strategies take."""

ZERO = "zero_optimization"


def set_stage(draft: Draft, setting: Setting) -> None:
    """Choose the strategy of a ZeRO stage."""
    stage = setting.whole(minimum=0)
    if stage >= len(STAGES):
        raise setting.wrong("a stage from 0 to 3")
    draft.option("name", STAGES[stage], setting)


def stage_of(draft: Draft) -> int:
    """Return the chosen stage: 0 where there is none."""
    return STAGES.index(draft.name) if draft.name in STAGES else 0


def set_offload(kind: str, least: int) -> Apply:
    """Return a function that chooses the store of a kind of state, from a stage on."""

    def apply(draft: Draft, setting: Setting) -> None:
        if setting.absent:
            return
        if setting.value not in {"cpu", "nvme"}:
            raise setting.wrong("none, cpu or nvme")
        if stage_of(draft) < least:
            raise ConfigError(
                f"{setting.where}: {setting} and stage {stage_of(draft)} contradict each other: it "
                f"needs stage {least} or more; raise the stage, or remove the section"
            )
        draft.option(f"offload.{kind}", setting.value, setting)
        if kind == "params" and "optimizer" not in draft.strategy["offload"]:
            # Parameters in a store are stepped there.
            draft.option("offload.optimizer", setting.value, setting)

    return apply


def set_path(device: str) -> Apply:
    """Return a function that sets the directory, if the device of the same section is a disk."""

    def apply(draft: Draft, setting: Setting) -> None:
        if setting.absent or draft.value(device) != "nvme":
            return
        path = draft.strategy.get("offload", {}).get("path", setting.value)
        if path != setting.value:
            draft.remark(setting, "a directory for this kind of state alone", f"`path: {path}`")
            return
        draft.option("offload.path", setting.value, setting)

    return apply


def check_path(draft: Draft, device: Setting) -> None:
    """Refuse a disk without a directory.

    Raises:
        ConfigError: there is none.
    """
    if device.value == "nvme" and not draft.strategy.get("offload", {}).get("path"):
        raise ConfigError(
            f"{device.where}: {device} needs a directory on a disk, found none; add the nvme_path "
            "that belongs to it"
        )


def set_precision(name: str) -> Apply:
    """Return a function that turns a precision on, with fp32 masters."""

    def apply(draft: Draft, setting: Setting) -> None:
        if setting.on:
            draft.set("precision", name, setting)
            draft.low = name

    return apply


def set_bucket(draft: Draft, setting: Setting) -> None:
    """Set the size of buckets, in MiB of the dtype that gradients have."""
    if stage_of(draft) == 0:
        draft.remark(setting, "no effect at stage 0", "no effect")
        return
    width = LOW_BYTES if draft.low else FP32_BYTES
    mib = round(setting.number() * width / MIB, 3)
    draft.option("bucket_mib", min(max(mib, 0.001), LARGEST_BUCKET_MIB), setting)


def stage_3_option(key: str) -> Apply:
    """Return a function that sets an option of stage 3."""

    def apply(draft: Draft, setting: Setting) -> None:
        if stage_of(draft) < 3:
            draft.remark(setting, f"no effect at stage {stage_of(draft)}", "no effect")
        else:
            draft.option(key, setting.whole(minimum=0), setting)

    return apply


def set_groups(draft: Draft, setting: Setting) -> None:
    """Set the group of ranks that keeps units together until backward."""
    if setting.whole() > 1:
        stage_3_option("reshard_after_forward")(draft, setting)


def set_mics(draft: Draft, setting: Setting) -> None:
    """Choose replicas of groups of ranks, which divide the model."""
    size = int(setting.number())
    if size > 1:  # -1 turns it off
        draft.strategy.pop("name", None)
        draft.option("name", "fsdp", setting)
        draft.option("sharding", "hybrid", setting)
        draft.option("shard_size", size, setting)


def set_ratio(draft: Draft, setting: Setting) -> None:
    """Set the share of parameters whose optimizer's state is offloaded."""
    offload = draft.strategy.get("offload", {})
    if setting.number() == 1 or not offload.get("optimizer"):
        return
    if offload.get("params"):
        draft.remark(setting, "the share of parameters updated in the store", "all of them")
    else:
        draft.option("offload.ratio", setting.number(), setting)


def store_option(key: str, store: str, divisor: int = 1) -> Apply:
    """Return a function that sets an option of a store in use."""

    def apply(draft: Draft, setting: Setting) -> None:
        offload = draft.strategy.get("offload", {})
        if store in (offload.get("optimizer"), offload.get("params")):
            value = setting.on if isinstance(setting.value, bool) else setting.whole() / divisor
            draft.option(f"offload.store_options.{key}", value, setting)

    return apply


def set_threads(draft: Draft, setting: Setting) -> None:
    """Set the requests in flight: the largest of the numbers that stand for them."""
    if "nvme" in draft.strategy.get("offload", {}).values():
        before = draft.strategy["offload"].get("store_options", {}).get("threads", 1)
        if setting.whole() > before:
            draft.option("offload.store_options.threads", setting.whole(), setting)


def set_wire(draft: Draft, setting: Setting) -> None:
    """Set the dtype of gradients on the wire."""
    if setting.absent:
        return
    if setting.value == "fp16" and draft.value("fp16.enabled") is not True:
        draft.remark(setting, "gradients cross ranks in fp16", "`precision: fp16` needs to be on")
    elif setting.value in {"fp16", "bf16", "fp32"}:
        draft.set("dtypes.reduce", setting.value, setting)
    else:
        raise setting.wrong("fp16, bf16 or fp32")


def set_cpu_checkpointing(draft: Draft, setting: Setting) -> None:
    """Recompute blocks whose inputs wait in host memory."""
    if setting.on:
        draft.set("recompute.mode", "full", setting)
        draft.set("recompute.keep", "cpu", setting)


def set_layers(draft: Draft, setting: Setting) -> None:
    """Set how many ranks share every layer."""
    if setting.whole(minimum=0) > 1:
        draft.cell_option("tp", setting.whole(), setting)


def check_batch(draft: Draft, setting: Setting) -> None:
    """Remark on the batch of all ranks; the three numbers must fit together."""
    total = setting.whole()
    own = (draft.value("train_micro_batch_size_per_gpu") or 1) * (
        draft.value("gradient_accumulation_steps") or 1
    )
    if total % own:
        raise ConfigError(
            f"{setting.where}: {setting} contradicts train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps = {own}, which does not divide it; change one of them"
        )
    draft.remark(
        setting,
        "samples of all ranks in one optimizer step",
        f"the loader's `batch_size` x `accumulation` x ranks; {total // own} ranks if the other "
        "two are as above",
    )


def old_offload(kind: str, least: int) -> Apply:
    """Return a function that reads the switch of older versions."""

    def apply(draft: Draft, setting: Setting) -> None:
        if setting.on:
            set_offload(kind, least)(draft, Setting(setting.key, "cpu", setting.where))

    return apply
