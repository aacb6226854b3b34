"""Accelerate's files and ``accelerate launch``: their settings, and our counterparts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.config import Layer, read_file
from drivetrain.config.foreign import Importer, Translation
from drivetrain.errors import ConfigError
from drivetrain_migration.command_line import read_options, script_draft, set_hosts
from drivetrain_migration.deepspeed import draft_of
from drivetrain_migration.draft import (
    WHOLE,
    Draft,
    Row,
    Setting,
    nothing,
    remark_if_on,
    settings,
    to,
)
from drivetrain_migration.layers import MEGATRON, MEGATRON_ROWS, PARALLEL_ROWS
from drivetrain_migration.sharding import (
    DEEPSPEED,
    DEEPSPEED_ROWS,
    FILE_EXCLUDES,
    FSDP,
    FSDP_ROWS,
)
from drivetrain_migration.zero import check_path

SECTIONS = {"DEEPSPEED": DEEPSPEED, "FSDP": FSDP, "MEGATRON_LM": MEGATRON}
"""The section that belongs to each kind of ``distributed_type`` with one."""

FIRST_STRATEGY = {"DEEPSPEED": WHOLE, "FSDP": "fsdp"}
"""The strategy of a kind until a row chooses another one."""

KINDS = ("NO", "CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "XPU", "NEURON")
"""Devices of ``distributed_type`` without a section, after ``MULTI_`` where there are several."""

FILE_KEY = f"{DEEPSPEED}.deepspeed_config_file"
_TPU = "a TPU"


def _precision(draft: Draft, setting: Setting) -> None:
    word = "no" if setting.value in (None, False) else str(setting.value)
    if word not in {"no", "bf16", "fp16", "fp8"}:
        raise setting.wrong("no, fp16, bf16 or fp8")
    if word == "fp8":
        draft.remark(setting, "computes products in 8 bits", "bf16")
        word = "bf16"
    before = draft.ours("precision")
    if before not in (None, word) and word != "no":
        raise ConfigError(
            f"{setting.where}: {setting} contradicts {before} in the file of DeepSpeed; keep one"
        )
    if word == "no":
        return
    draft.set("precision", word, setting)
    if kind_of(draft) in SECTIONS:
        draft.low = word


def _on_cpu(draft: Draft, setting: Setting) -> None:
    if setting.on:
        draft.set("launch.device", "cpu", setting)


def _kind(draft: Draft, setting: Setting) -> None:
    if setting.value in {"XLA", "TPU"}:
        raise setting.wrong("a machine with CPUs or GPUs (TPUs are not supported)")
    if str(setting.value).removeprefix("MULTI_") not in {*KINDS, *SECTIONS}:
        raise setting.wrong(f"NO, MULTI_GPU, MULTI_CPU, {', '.join(SECTIONS)}")
    if setting.value == "MULTI_CPU":
        draft.set("launch.device", "cpu", setting)


def _environment(draft: Draft, setting: Setting) -> None:
    if setting.value != "LOCAL_MACHINE":
        raise setting.wrong("LOCAL_MACHINE (others, such as SageMaker, are not supported)")


def _ranks(draft: Draft, setting: Setting) -> None:
    if setting.number() < 1:  # -1 takes what the launcher finds
        return
    total = setting.whole()
    if total % draft.hosts:
        raise ConfigError(
            f"{setting.where}: {setting} contradicts num_machines: {draft.hosts}, which does not "
            "divide it; change one of them: every host runs as many ranks"
        )
    draft.set("launch.nproc_per_node", total // draft.hosts, setting)


def _machines(draft: Draft, setting: Setting) -> None:
    if setting.whole() > 1:
        draft.set("launch.nnodes", setting.whole(), setting)


def _machine_rank(draft: Draft, setting: Setting) -> None:
    if draft.hosts == 1:
        return
    if setting.whole(minimum=0) >= draft.hosts:
        raise setting.wrong(f"0 to {draft.hosts - 1} with num_machines: {draft.hosts}")
    draft.set("launch.node_rank", setting.whole(minimum=0), setting)


def _devices(draft: Draft, setting: Setting) -> None:
    if not setting.absent and setting.value != "all":
        chosen = f"`CUDA_VISIBLE_DEVICES={setting.value} drivetrain launch ...`"
        draft.remark(setting, "which devices", chosen)


TOP_ROWS: tuple[Row, ...] = (
    Row("compute_environment", "where it runs", "this machine", _environment),
    Row("distributed_type", "how it is spread", "`strategy`", _kind),
    Row("mixed_precision", "dtype of computation", "`precision`", _precision),
    Row("use_cpu", "leaves accelerators alone", "`launch.device: cpu`, `--cpu`", _on_cpu),
    Row("num_machines", "number of hosts", "`launch.nnodes`, `--nnodes`", _machines),
    Row(
        "num_processes",
        "ranks of all hosts",
        "`launch.nproc_per_node`, `--nproc-per-node`: those of each host",
        _ranks,
    ),
    Row("machine_rank", "index of this host", "`launch.node_rank`, `--node-rank`", _machine_rank),
    Row(
        "main_process_ip",
        "address of host 0",
        "`launch.rdzv_endpoint`, `--rdzv-endpoint HOST:PORT`",
        nothing,
    ),
    Row(
        "main_process_port",
        "port on host 0",
        "`launch.rdzv_endpoint`, `--rdzv-endpoint HOST:PORT`",
        nothing,
    ),
    Row("gpu_ids", "which devices", "`CUDA_VISIBLE_DEVICES`", _devices),
    Row("rdzv_backend", "how hosts meet", "`c10d`, always", nothing),
    Row("same_network", "whether hosts share a network", "found", nothing),
    Row("main_training_function", "name of a function, for TPUs", "not needed", nothing),
    Row("debug", "compares shapes between ranks", "always", nothing),
    Row(
        "enable_cpu_affinity",
        "ties ranks to cores",
        "`launch.threads_per_rank`",
        remark_if_on("ties ranks to cores", "not here"),
    ),
    Row("downcast_bf16", "a dtype of TPUs", "not here", remark_if_on(_TPU, "not here")),
    Row("dynamo_config.*", "torch.compile", "`torch.compile` of the model in the script"),
    Row("fp8_config.*", "how products in 8 bits are made", "not here"),
    Row("ipex_config.*", "Intel's extension of torch", "not here"),
    Row("mpirun_config.*", "starts ranks by mpirun", "`drivetrain launch` on every host"),
    *(
        Row(key, _TPU, "not here", remark_if_on(_TPU, "not here"))
        for key in (
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_env",
            "commands",
            "command_file",
        )
    ),
)

LAUNCH_ROWS: tuple[Row, ...] = (
    Row(
        "num_cpu_threads_per_process",
        "threads of a rank",
        "`launch.threads_per_rank`",
        to("launch.threads_per_rank"),
    ),
    Row("max_restarts", "restarts after failures", "`--max-restarts`", to("launch.max_restarts")),
    Row("log_dir", "a log file for each rank", "`--log-dir`", to("launch.log_dir")),
    Row("module", "the script is a module", "`-m`", nothing),
    Row("quiet", "shorter errors", "always", nothing),
    Row("multi_gpu", "several ranks", "nothing: all accelerators take part", nothing),
    Row("use_deepspeed", "DeepSpeed", "`--strategy zero1`, `zero2` or `zero3`", nothing),
    Row("use_fsdp", "FSDP", "`--strategy fsdp`", nothing),
    Row("use_megatron_lm", "Megatron", "`--strategy megatron --set strategy.tp=2`", nothing),
    Row("use_parallelism_config", "parallel dimensions", "options of `--strategy`", nothing),
    Row("monitor_interval", "seconds between looks at the ranks", "not needed"),
    Row("rdzv_conf", "details of the meeting", "`--set launch.timeout_s=600`"),
    Row("role", "a name of these ranks in logs", "not needed"),
    Row("tee", "streams that go to files, too", "`--log-dir`"),
    Row("no_python", "the script is no Python program", "not here"),
    *(
        Row(f"dynamo_{key}", "torch.compile", "`torch.compile` of the model in the script")
        for key in (
            "backend",
            "mode",
            "use_fullgraph",
            "use_dynamic",
            "use_regional_compilation",
        )
    ),
    Row("mpirun_hostfile", "starts ranks by mpirun", "`drivetrain launch` on every host"),
)

ROWS: tuple[Row, ...] = (
    *DEEPSPEED_ROWS,
    *FSDP_ROWS,
    *PARALLEL_ROWS,
    *MEGATRON_ROWS,
    *TOP_ROWS,
)

_SWITCHES = {
    "cpu",
    "multi_gpu",
    "tpu",
    "use_deepspeed",
    "use_fsdp",
    "use_megatron_lm",
    "use_parallelism_config",
    "quiet",
    "same_network",
    "module",
    "no_python",
    "debug",
    "enable_cpu_affinity",
    "dynamo_use_fullgraph",
    "dynamo_use_dynamic",
    "dynamo_use_regional_compilation",
}
_KINDS_OF_SWITCHES = {
    "tpu": "XLA",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}


def kind_of(draft: Draft) -> str:
    """Return the kind of ``distributed_type``; without this key the sections tell the kind."""
    given = draft.value("distributed_type")
    if given is not None:
        return str(given)
    tops = {key.partition(".")[0] for key in draft.given}
    return next((kind for kind, section in SECTIONS.items() if section in tops), "NO")


def translate_values(layer: Layer, folder: Path, draft: Draft, extra: Sequence[Row] = ()) -> Draft:
    """Apply the rows of Accelerate's keys to a draft.

    Args:
        layer: the values of a file, or of the arguments of plugins.
        folder: in which a file of DeepSpeed may lie.
        draft: of a file of DeepSpeed that the script names, or a new one.
        extra: rows of options that no file has.

    Raises:
        ConfigError: a key is unknown, or settings contradict each other.
    """
    rows = (*ROWS, *extra)
    found = settings(layer, rows)
    beside = _file_of_deepspeed(found, folder)
    if beside is not None:
        draft = beside
    draft.read(found)
    kind = kind_of(draft)
    if kind in FIRST_STRATEGY and not draft.strategy:
        draft.strategy["name"] = FIRST_STRATEGY[kind]
    active = SECTIONS.get(kind)
    idle = [section for section in SECTIONS.values() if section != active]
    for setting in found.values():
        if setting.key.partition(".")[0] in idle:
            draft.remark(setting, f"no effect with distributed_type: {kind}", "no effect")
    draft.apply(row for row in rows if row.key.partition(".")[0] not in idle)
    for section in ("offload_optimizer", "offload_param"):
        device = found.get(f"{DEEPSPEED}.{section}_device")
        if device is not None and kind == "DEEPSPEED":
            check_path(draft, device)
    set_hosts(draft, "main_process_ip", "main_process_port", "num_machines")
    draft.strategy.setdefault("name", WHOLE)
    return draft


def _file_of_deepspeed(found: Mapping[str, Setting], folder: Path) -> Draft | None:
    """Return the draft of the file of DeepSpeed that a file of Accelerate names."""
    named = found.get(FILE_KEY)
    if named is None or named.absent:
        return None
    both = [str(found[key]) for key in FILE_EXCLUDES if key in found]
    if both:
        raise ConfigError(
            f"{named.where}: {named} and {', '.join(both)} contradict each other; keep the file, "
            "or these keys"
        )
    path = Path(str(named.value))
    return draft_of(read_file(path if path.exists() else folder / path))


class Accelerate(Importer):
    """Accelerate: its YAML, and the command ``accelerate launch``."""

    title: ClassVar[str] = "an Accelerate configuration"
    programs: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("accelerate", "launch"),
        ("accelerate-launch",),
        ("python", "-m", "accelerate.commands.launch"),
    )
    flags: ClassVar[Mapping[str, str]] = {
        row.key.rpartition(".")[2]: row.here for row in (*ROWS, *LAUNCH_ROWS)
    } | {
        "config_file": "`--config` with a file of `drivetrain config import FILE`",
        "tpu": "no TPUs",
    }

    def recognizes(self, values: Mapping[str, Any]) -> bool:
        """Return whether there are keys that Accelerate alone has."""
        return bool({"distributed_type", "compute_environment", *SECTIONS.values()} & set(values))

    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Translate a YAML file."""
        return translate_values(layer, folder, Draft({})).finish()

    def translate_command(self, words: Sequence[str], folder: Path) -> Translation:
        """Translate a call of ``accelerate launch`` and the files in its options."""
        keys = {row.key.rpartition(".")[2]: row.key for row in (*ROWS, *LAUNCH_ROWS)}
        line = read_options(
            words,
            {*keys, "config_file"} - _SWITCHES,
            _SWITCHES,
            {"-m": "module"},
            "accelerate launch",
        )
        options = dict(line.options)
        file = options.pop("config_file", None)
        for switch, kind in _KINDS_OF_SWITCHES.items():
            if options.get(switch):
                options["distributed_type"] = kind
        options.pop("tpu", None)
        if options.pop("cpu", False):
            options["use_cpu"] = True
        layer = type(line)(options, line.script).layer(keys, "accelerate launch")
        if file is not None:
            layer = _over(read_file(folder / str(file)), layer)
        draft, script = script_draft(line.script, folder)
        draft = translate_values(layer, folder, draft, LAUNCH_ROWS)
        draft.script = (*(["-m"] if options.get("module") else []), *script)
        return draft.finish()


def _over(below: Layer, above: Layer) -> Layer:
    """Return a file with the options of a command line laid over it."""
    values = dict(below.values)
    for key, value in above.values.items():
        inner = values.get(key)
        sections = isinstance(inner, Mapping) and isinstance(value, Mapping)
        values[key] = {**(inner or {}), **value} if sections else value
    return Layer(values, {**below.origins, **above.origins})
