"""Files and command lines of other launchers: Accelerate, torchrun and DeepSpeed.

Accelerate's files and ``accelerate launch``.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.config import Layer, ValueOrigin, read_file
from drivetrain.config.document import Importer, Translation
from drivetrain.errors import ConfigError
from drivetrain_migration.converters import (
    DEEPSPEED,
    SECTIONS,
    WHOLE,
    Draft,
    Row,
    Setting,
    Table,
    check_paths,
    kind_of,
    settings,
    table_of,
)

# --- command lines of other launchers ---

ZERO = "zero_optimization"

SCRIPT_OPTIONS = ("--deepspeed", "--deepspeed_config")
"""Arguments of a script that may name a file of DeepSpeed."""

DEFAULT_PORT = 29500
"""The port that torchrun, Accelerate and DeepSpeed take where none is given."""


def read_options(
    words: Sequence[str],
    known: Collection[str],
    table: Table,
    program: str,
) -> tuple[dict[str, Any], list[str]]:
    """Divide the words of a command line into its options and its script, as its own parser would.

    Args:
        words: those after the program's.
        known: all options.
        table: of the program.
        program: for messages.

    Returns:
        The options by name, with ``_`` for ``-`` and without dashes, True for a switch; and the
        words from the script on.

    Raises:
        ConfigError: an option is unknown, or lacks its value.
    """
    options: dict[str, Any] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        name = table.short.get(name, name.lstrip("-").replace("-", "_"))
        if name in table.switches:
            options[name] = True
        elif name not in known:
            raise ConfigError(f"{program}: unknown option {word}; remove it from the line")
        elif not equals and not rest:
            raise ConfigError(f"{program}: expected a value after {word}, found none")
        else:
            options[name] = _scalar(value if equals else rest.pop(0))
    return options, rest


def _scalar(text: str) -> Any:
    """Return the number or truth value that a word of a command line stands for, else the word."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def layer_of(options: Mapping[str, Any], keys: Mapping[str, str], program: str) -> Layer:
    """Return options as the values of a file.

    Args:
        options: value by name.
        keys: dotted key of an option; an option that is absent has its own name for a key.
        program: whose options they are, for messages.
    """
    return Layer.of(
        (keys.get(name, name), value, ValueOrigin("command line", f"{program} --{name}"))
        for name, value in options.items()
    )


def draft_of_file(layer: Layer) -> Draft:
    """Return the draft of DeepSpeed's JSON with every row applied.

    Raises:
        ConfigError: a key is unknown, or settings contradict each other.
    """
    rows = table_of("deepspeed").settings
    draft = Draft(settings(layer, rows))
    low = [draft.given[key] for key in ("bf16.enabled", "fp16.enabled") if draft.value(key) is True]
    if len(low) > 1:
        raise ConfigError(
            f"{low[1].where}: {low[0]} and {low[1]} contradict each other; keep one of them"
        )
    if f"{ZERO}.stage" not in draft.given:
        draft.strategy["name"] = WHOLE
    draft.apply(rows)
    check_paths(draft, (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device"))
    return draft


def draft_of_script(script: Sequence[str], folder: Path, as_module: bool) -> Draft:
    """Return a draft with a script's words, of the DeepSpeed file that its arguments name.

    Raises:
        ConfigError: the file cannot be read or translated.
    """
    draft = Draft({})
    for position, word in enumerate(script):
        name, equals, value = word.partition("=")
        after = value if equals else next(iter(script[position + 1 :]), "")
        if name in SCRIPT_OPTIONS and after.endswith(".json"):
            draft = draft_of_file(read_file(folder / after))
            draft.remark(
                Setting(name, after, ""), "an argument of the script", "left out: this file has it"
            )
            rest = (*script[:position], *script[position + (1 if equals else 2) :])
            script = [each for each in rest if each != SCRIPT_OPTIONS[0]]
            break
    draft.script = ("-m", *script) if as_module else tuple(script)
    return draft


def set_hosts(draft: Draft, address: str, port: str, hosts: str) -> None:
    """Set where several hosts meet.

    Args:
        draft: gets the endpoint.
        address: key of the address of host 0.
        port: key of its port.
        hosts: key of the number of hosts.

    Raises:
        ConfigError: there are several hosts, and no address.
    """
    count = draft.given.get(hosts)
    if count is None or draft.hosts == 1:
        return
    where, at = draft.given.get(address), draft.given.get(port)
    if where is None or where.absent or str(where.value).startswith("$"):
        raise ConfigError(
            f"{count.where}: {count} needs the address of host 0 in {address}, found "
            f"{'none' if where is None else where.value}; add it, such as 10.0.0.1"
        )
    number = DEFAULT_PORT if at is None or at.absent else at.whole()
    host = f"[{where.value}]" if str(where.value).count(":") > 1 else where.value
    draft.set("launch.rdzv_endpoint", f"{host}:{number}", where)


class TableImporter(Importer):
    """An importer whose facts stand in the table of its program."""

    table: ClassVar[Table]

    def __init_subclass__(cls, program: str) -> None:
        cls.table = table = table_of(program)
        cls.title, cls.programs = table.title, tuple(map(tuple, table.programs))
        rows = (*(table.settings if table.takes_settings else ()), *table.options)
        cls.flags = {row.key.rpartition(".")[2]: row.here for row in rows} | dict(table.flags)

    def recognizes(self, values: Mapping[str, Any]) -> bool:
        """Return whether there are keys that files of the program alone have."""
        return not set(self.table.marks).isdisjoint(values)

    def draft_of_options(self, words: Sequence[str], folder: Path) -> Draft:
        """Return the draft of options, over a DeepSpeed file that the script names."""
        rows, program = self.table.options, self.programs[0][0]
        options, script = read_options(words, {row.key for row in rows}, self.table, program)
        draft = draft_of_script(script, folder, bool(options.get("module")))
        draft.read(settings(layer_of(options, {}, program), rows))
        draft.apply(rows)
        return draft


class Torchrun(TableImporter, program="torchrun"):
    """torchrun, which has no files of its own."""

    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Refuse: there are no such files."""
        raise ConfigError("expected a command line of torchrun, found a file")

    def translate_command(self, words: Sequence[str], folder: Path) -> Translation:
        """Translate a command line."""
        draft = self.draft_of_options(words, folder)
        if "rdzv_endpoint" in draft.given and draft.hosts > 1:
            endpoint = draft.given["rdzv_endpoint"]
            host, _, port = str(endpoint.value).rpartition(":")
            parts = {"master_addr": host, "master_port": port} if host else {"master_addr": port}
            draft.read({key: Setting(key, value, endpoint.where) for key, value in parts.items()})
        set_hosts(draft, "master_addr", "master_port", "nnodes")
        return draft.finish()


class DeepSpeed(TableImporter, program="deepspeed"):
    """DeepSpeed: its JSON, and the command ``deepspeed``."""

    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Translate a JSON file."""
        return draft_of_file(layer).finish()

    def translate_command(self, words: Sequence[str], folder: Path) -> Translation:
        """Translate a call of the launcher, with the JSON file that its script names."""
        draft = self.draft_of_options(words, folder)
        set_hosts(draft, "master_addr", "master_port", "num_nodes")
        return draft.finish()


# --- accelerate's files and ``accelerate launch`` ---

FIRST_STRATEGY = {"DEEPSPEED": WHOLE, "FSDP": "fsdp"}
"""The strategy of a kind until a row chooses another one."""

OFFLOAD_DEVICES = ("offload_optimizer_device", "offload_param_device")


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
    keys = (f"{DEEPSPEED}.{key}" for key in table_of("accelerate").excludes)
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


class Accelerate(TableImporter, program="accelerate"):
    """Accelerate: its YAML, and the command ``accelerate launch``."""

    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Translate a YAML file."""
        return translate_values(layer, folder, Draft({})).finish()

    def translate_command(self, words: Sequence[str], folder: Path) -> Translation:
        """Translate a call of ``accelerate launch`` and the files in its options."""
        table, program = self.table, "accelerate launch"
        rows = (*table.settings, *table.options)
        keys = {row.key.rpartition(".")[2]: row.key for row in rows}
        options, script = read_options(words, {*keys, "config_file"}, table, program)
        file = options.pop("config_file", None)
        for switch, kind in table.kinds.items():
            if options.get(switch):
                options["distributed_type"] = kind
        options.pop("tpu", None)
        if options.pop("cpu", False):
            options["use_cpu"] = True
        layer = layer_of(options, keys, program)
        if file is not None:
            layer = _over(read_file(folder / str(file)), layer)
        draft = draft_of_script(script, folder, bool(options.get("module")))
        return translate_values(layer, folder, draft, table.options).finish()


def _over(below: Layer, above: Layer) -> Layer:
    """Return a file with the options of a command line laid over it."""
    values = dict(below.values)
    for key, value in above.values.items():
        inner = values.get(key)
        sections = isinstance(inner, Mapping) and isinstance(value, Mapping)
        values[key] = {**(inner or {}), **value} if sections else value
    return Layer(values, {**below.origins, **above.origins})
