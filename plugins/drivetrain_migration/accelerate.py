"""Accelerate's files and ``accelerate launch``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.config import Layer, read_file
from drivetrain.config.document import Importer, Translation
from drivetrain.errors import ConfigError
from drivetrain_migration.converters import (
    DEEPSPEED,
    SECTIONS,
    WHOLE,
    Draft,
    Row,
    Setting,
    check_paths,
    kind_of,
    settings,
    table_of,
)
from drivetrain_migration.launchers import (
    draft_of_file,
    draft_of_script,
    flags_of,
    layer_of,
    read_options,
    set_hosts,
)

FIRST_STRATEGY = {"DEEPSPEED": WHOLE, "FSDP": "fsdp"}
"""The strategy of a kind until a row chooses another one."""

OFFLOAD_DEVICES = ("offload_optimizer_device", "offload_param_device")
FILE_EXCLUDES = (
    *("zero_stage", "gradient_accumulation_steps", "gradient_clipping", *OFFLOAD_DEVICES),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model"),
)
"""Keys that Accelerate refuses beside a file of DeepSpeed, which has them itself."""

KINDS_OF_SWITCHES = {
    "tpu": "XLA",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}


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
    rows = (*table_of("accelerate").settings, *extra)
    found = settings(layer, rows)
    draft = _file_of_deepspeed(found, folder, draft)
    draft.read(found)
    kind = kind_of(draft)
    if kind in FIRST_STRATEGY and not draft.strategy:
        draft.strategy["name"] = FIRST_STRATEGY[kind]
    idle = [section for each, section in SECTIONS.items() if each != kind]
    for setting in found.values():
        if setting.key.partition(".")[0] in idle:
            draft.remark(setting, f"no effect with distributed_type: {kind}", "no effect")
    draft.apply(row for row in rows if row.key.partition(".")[0] not in idle)
    if kind == "DEEPSPEED":
        check_paths(draft, [f"{DEEPSPEED}.{key}" for key in OFFLOAD_DEVICES])
    set_hosts(draft, "main_process_ip", "main_process_port", "num_machines")
    draft.strategy.setdefault("name", WHOLE)
    return draft


def _file_of_deepspeed(found: Mapping[str, Setting], folder: Path, draft: Draft) -> Draft:
    """Return the draft of the file of DeepSpeed that a file of Accelerate names, if it does."""
    named = found.get(f"{DEEPSPEED}.deepspeed_config_file")
    if named is None or named.absent:
        return draft
    keys = (f"{DEEPSPEED}.{key}" for key in FILE_EXCLUDES)
    both = [str(found[key]) for key in keys if key in found]
    if both:
        raise ConfigError(
            f"{named.where}: {named} and {', '.join(both)} contradict each other; keep the file, "
            "or these keys"
        )
    path = Path(str(named.value))
    beside = draft_of_file(read_file(path if path.exists() else folder / path))
    beside.script = draft.script
    return beside


class Accelerate(Importer):
    """Accelerate: its YAML, and the command ``accelerate launch``."""

    title: ClassVar[str] = "an Accelerate configuration"
    programs: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("accelerate", "launch"),
        ("accelerate-launch",),
        ("python", "-m", "accelerate.commands.launch"),
    )
    rows: ClassVar[Sequence[Row]] = (
        *table_of("accelerate").settings,
        *table_of("accelerate").options,
    )
    flags: ClassVar[Mapping[str, str]] = flags_of(rows) | {
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
        keys = {row.key.rpartition(".")[2]: row.key for row in self.rows}
        switches, program = table_of("accelerate").switches, "accelerate launch"
        options, script = read_options(
            words, {*keys, "config_file"}, switches, {"-m": "module"}, program
        )
        file = options.pop("config_file", None)
        for switch, kind in KINDS_OF_SWITCHES.items():
            if options.get(switch):
                options["distributed_type"] = kind
        options.pop("tpu", None)
        if options.pop("cpu", False):
            options["use_cpu"] = True
        layer = layer_of(options, keys, program)
        if file is not None:
            layer = _over(read_file(folder / str(file)), layer)
        draft = draft_of_script(script, folder, bool(options.get("module")))
        return translate_values(layer, folder, draft, table_of("accelerate").options).finish()


def _over(below: Layer, above: Layer) -> Layer:
    """Return a file with the options of a command line laid over it."""
    values = dict(below.values)
    for key, value in above.values.items():
        inner = values.get(key)
        sections = isinstance(inner, Mapping) and isinstance(value, Mapping)
        values[key] = {**(inner or {}), **value} if sections else value
    return Layer(values, {**below.origins, **above.origins})
