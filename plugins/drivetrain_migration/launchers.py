"""Files and command lines of other launchers: Accelerate, torchrun and DeepSpeed.

A translation in the making applies the rows of a program's table to the settings of a file. A
converter tells how a foreign value becomes ours; it takes the draft, the setting, and the further
arguments of its row.
"""

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from drivetrain.config import Layer, ValueOrigin, read_file
from drivetrain.config.document import Importer, Translation, put
from drivetrain.errors import ConfigError

AUTO = "auto"
"""DeepSpeed's word for a value that Accelerate or transformers fill in from the script."""

ABSENT = "not here"
"""The counterpart of a setting that has none."""

CELL = "megatron"
"""The strategy that divides layers, around the data-parallel strategy of each of its cells."""

WHOLE = "ddp"
"""The strategy that keeps models whole: it has no masters beside its parameters."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of another program's file, its value, and the place where it stands."""

    key: str
    value: Any
    where: str

    def __str__(self) -> str:
        words = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"{self.key}: {words}"

    @property
    def on(self) -> bool:
        """Whether it is set to true, which a command line may write as a word."""
        return str(self.value).lower() in {"true", "1", "yes"}

    @property
    def absent(self) -> bool:
        """Whether its value says that there is none."""
        return self.value in (None, [], {}) or str(self.value).lower() in {"none", "null", ""}

    def number(self) -> float:
        """Return the value as a number.

        Raises:
            ConfigError: it is none.
        """
        try:
            return float(self.value)
        except (TypeError, ValueError):
            raise self.wrong("a number") from None

    def whole(self, minimum: int = 1) -> int:
        """Return the value as an integer of at least the minimum.

        Raises:
            ConfigError: it is something else.
        """
        number = self.number()
        if number != int(number) or number < minimum:
            raise self.wrong(f"an integer of at least {minimum}")
        return int(number)

    def wrong(self, expected: str) -> ConfigError:
        """Return the error that something else was expected."""
        return ConfigError(f"{self.where}: {self.key}: expected {expected}, found {self.value!r}")


class Row(NamedTuple):
    """One setting of another program.

    Attributes:
        key: dotted; a key that ends in ``.*`` stands for all keys of its section.
        there: its effect there.
        here: what stands for it here, with code in backticks.
        convert: carries a value over, or remarks on it where no key stands for it.
        arguments: of the converter, after the draft and the setting.
    """

    key: str
    there: str
    here: str
    convert: Callable[..., None]
    arguments: Sequence[Any]


@dataclass(slots=True)
class Draft:
    """Collects our values while rows are applied, strategies first.

    Attributes:
        given: the settings of the foreign file by dotted key.
        strategy: the data-parallel strategy and its options.
        cell: options of the strategy around it, where layers are divided.
        low: the dtype of parameters with fp32 masters, where the other program keeps both.
        script: the training script and its arguments, of a command line.
    """

    given: Mapping[str, Setting]
    strategy: dict[str, Any] = field(default_factory=dict)
    cell: dict[str, Any] = field(default_factory=dict)
    low: str = ""
    script: Sequence[str] = ()
    _values: dict[str, Any] = field(default_factory=dict)
    _origins: dict[str, str] = field(default_factory=dict)
    _remarks: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the data-parallel strategy; "" before it is chosen."""
        return str(self.strategy.get("name", ""))

    @property
    def hosts(self) -> int:
        """Number of hosts, as set so far."""
        return int(self._values.get("launch", {}).get("nnodes", 1))

    def read(self, found: Mapping[str, Setting]) -> None:
        """Take settings of another file of the same run."""
        self.given = {**self.given, **found}

    def ours(self, key: str) -> Any:
        """Return the value of a top key of ours; None where it is not set."""
        return self._values.get(key)

    def apply(self, rows: Iterable[Row]) -> None:
        """Apply every row to the setting of its key, in the order of the rows."""
        for row in rows:
            setting = self.given.get(row.key.removesuffix(".*"))
            if setting is not None and setting.value == AUTO:
                self.remark(setting, "taken from the script there", row.here)
            elif setting is not None:
                row.convert(self, setting, *row.arguments)

    def set(self, key: str, value: Any, setting: Setting) -> None:
        """Set a key of ours.

        Args:
            key: dotted, below ``strategy`` of the data-parallel strategy, below ``cell`` of the
                strategy that divides layers.
            value: of the key.
            setting: it comes from.
        """
        section, _, rest = key.partition(".")
        inner = {"strategy": self.strategy, "cell": self.cell}.get(section)
        put(*((self._values, key) if inner is None else (inner, rest)), value)
        self._origins[key] = str(setting)

    def remark(self, setting: Setting, there: str, here: str) -> None:
        """Remark on a setting: its effect there, and the way to have the effect here."""
        way = here if here == ABSENT else f"here: {here.replace('`', '')}"
        self._remarks.append(f"{setting}: {there}; {way}")

    def value(self, key: str) -> Any:
        """Return the value of a foreign key; None where it is not set, or left open."""
        setting = self.given.get(key)
        return None if setting is None or setting.value == AUTO else setting.value

    def finish(self) -> Translation:
        """Return the translation: the strategy first, inside of a cell if there is one."""
        values: dict[str, Any] = {}
        if self.low and self.name != WHOLE:
            self._values.setdefault("dtypes", {})["param"] = self.low
            self._origins["dtypes.param"] = "with fp32 masters, as there"
        inside = "strategy"
        if self.cell:
            values["strategy"] = {"name": CELL, **self.cell}
            inside = "strategy.data_parallel"
        if self.strategy:
            put(values, inside, dict(self.strategy))
        places = {"strategy": inside, "cell": "strategy"}
        origins = {}
        for key, text in self._origins.items():
            section, dot, rest = key.partition(".")
            origins[f"{places.get(section, section)}{dot}{rest}"] = text
        return Translation(
            values=values | self._values, origins=origins, remarks=self._remarks, script=self.script
        )


def settings(layer: Layer, rows: Sequence[Row]) -> dict[str, Setting]:
    """Return the settings of a file by dotted key.

    Raises:
        ConfigError: one line for each key that no row has.
    """
    sections = {row.key.removesuffix(".*") for row in rows if row.key.endswith(".*")}
    found = {key: _setting(key, value, layer) for key, value in _flat(layer.values, "", sections)}
    known = [row.key.removesuffix(".*") for row in rows]
    unknown = [setting for key, setting in found.items() if key not in known]
    if unknown:
        raise ConfigError("\n".join(_unknown(setting, known) for setting in unknown))
    return found


def _flat(values: Mapping[str, Any], prefix: str, sections: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; a section that one row stands for stays whole."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and dotted not in sections:
            yield from _flat(value, f"{dotted}.", sections)
        else:
            yield dotted, value


def _setting(key: str, value: Any, layer: Layer) -> Setting:
    name = key
    while name and name not in layer.origins:
        name = name.rpartition(".")[0]
    origin = layer.origins.get(name)
    return Setting(key, value, origin.text if origin else "configuration")


def _unknown(setting: Setting, known: Sequence[str]) -> str:
    inside = [key for key in known if key.startswith(f"{setting.key}.")]
    if inside:
        return str(setting.wrong(f"a section with keys such as {inside[0].rpartition('.')[2]}"))
    near = difflib.get_close_matches(setting.key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "remove it, or set its counterpart by hand"
    return f"{setting.where}: unknown key {setting.key}; {hint}"


# --- the tables, and the converters that they name ---


STAGES = (WHOLE, "zero1", "zero2", "zero3")
"""The strategy of each ZeRO stage."""

MIB = 1 << 20
FP32_BYTES, LOW_BYTES = 4, 2
LARGEST_BUCKET_MIB = 4096
"""The largest ``bucket_mib`` that strategies take."""

FSDP_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Names of ``fsdp_sharding_strategy``; older files have their numbers from 1."""

DEEPSPEED, FSDP, MEGATRON = "deepspeed_config", "fsdp_config", "megatron_lm_config"
SECTIONS = {"DEEPSPEED": DEEPSPEED, "FSDP": FSDP, "MEGATRON_LM": MEGATRON}
"""The section that belongs to each kind of ``distributed_type`` with one."""


class Table(NamedTuple):
    """The table of one program.

    Attributes:
        programs: words with which a command line of the program may start.
        settings: rows of the keys of its files.
        options: rows of the options of its command line.
        switches: options without a value.
        short: long names of one-letter options.
        title: of its files, with an article.
        marks: keys that its files alone have.
        takes_settings: whether its command line takes the keys of its files, too.
        flags: our counterparts of options without a row, or with another one than the row's.
        kinds: the ``distributed_type`` that a switch stands for.
        excludes: keys that must not stand beside a file of DeepSpeed, which has them itself.
        meeting: keys of the address of host 0, its port, and the number of hosts.
    """

    programs: Sequence[Sequence[str]]
    settings: Sequence[Row]
    options: Sequence[Row]
    switches: Sequence[str]
    short: Mapping[str, str]
    title: str = ""
    marks: Sequence[str] = ()
    takes_settings: bool = False
    flags: Mapping[str, str] = {}
    kinds: Mapping[str, str] = {}
    excludes: Sequence[str] = ()
    meeting: Sequence[str] = ()


@lru_cache
def table_of(program: str) -> Table:
    """Read the table of a program, which lies beside this module."""
    values = tomllib.loads(Path(__file__).with_name(f"{program}.toml").read_text("utf-8"))
    rows = {kind: tuple(_rows(values.get(kind, ()))) for kind in ("settings", "options")}
    return Table(**values | rows)


def _rows(lines: Sequence[Sequence[Any]]) -> Iterator[Row]:
    for keys, there, here, *conversion in lines:
        name, *arguments = conversion or ["remark"]
        if name.startswith("remark") and not arguments:
            arguments = [there, here]
        before, _, rest = keys.partition("{")
        names, _, after = rest.partition("}")
        for each in names.split() or [""]:
            yield Row(f"{before}{each}{after}", there, here, _converter(name), arguments)


def _converter(name: str) -> Any:
    return getattr(sys.modules[__name__], name)


# --- of any setting ---


def nothing(draft: Draft, setting: Setting) -> None:
    """Carry nothing over: the setting was read with another one, or has no effect here."""


def remark(draft: Draft, setting: Setting, there: str, here: str) -> None:
    """Remark on the setting."""
    draft.remark(setting, there, here)


def remark_if_on(draft: Draft, setting: Setting, there: str, here: str) -> None:
    """Remark on a setting that is on: here the effect is off."""
    if setting.on or not (setting.absent or str(setting.value).lower() in {"false", "0", "no"}):
        draft.remark(setting, there, here)


def remark_above_one(draft: Draft, setting: Setting, there: str, here: str) -> None:
    """Remark on a number of ranks above 1."""
    if setting.whole() > 1:
        draft.remark(setting, there, here)


def to(draft: Draft, setting: Setting, key: str) -> None:
    """Copy the value."""
    draft.set(key, setting.value, setting)


def if_on(draft: Draft, setting: Setting, values: Mapping[str, Any]) -> None:
    """Set values where the setting is on."""
    if setting.on:
        for key, value in values.items():
            draft.set(key, value, setting)


def choice(
    draft: Draft, setting: Setting, words: Mapping[str, Mapping[str, Any]], expected: str
) -> None:
    """Set the values of a word; refuse other words."""
    values = words.get(str(setting.value).upper())
    if values is None:
        raise setting.wrong(expected)
    for key, value in values.items():
        draft.set(key, value, setting)


def above_one(draft: Draft, setting: Setting, key: str, minimum: int = 1) -> None:
    """Copy a number above 1."""
    if setting.whole(minimum) > 1:
        draft.set(key, setting.whole(), setting)


# --- ZeRO, of DeepSpeed's own files and those of Accelerate ---


def _stage_of(draft: Draft) -> int:
    """Return the chosen stage: 0 where there is none."""
    return STAGES.index(draft.name) if draft.name in STAGES else 0


def offload(draft: Draft, setting: Setting, kind: str, least: int) -> None:
    """Choose the store of a kind of state, from a stage on."""
    if setting.absent:
        return
    if setting.value not in {"cpu", "nvme"}:
        raise setting.wrong("none, cpu or nvme")
    if _stage_of(draft) < least:
        raise ConfigError(
            f"{setting.where}: {setting} and stage {_stage_of(draft)} contradict each other: it "
            f"needs stage {least} or more; raise the stage, or remove the section"
        )
    draft.set(f"strategy.offload.{kind}", setting.value, setting)
    if kind == "params" and "optimizer" not in draft.strategy["offload"]:
        # Parameters in a store are stepped there.
        draft.set("strategy.offload.optimizer", setting.value, setting)


def old_offload(draft: Draft, setting: Setting, kind: str, least: int) -> None:
    """Read the switch of older versions."""
    if setting.on:
        offload(draft, Setting(setting.key, "cpu", setting.where), kind, least)


def path(draft: Draft, setting: Setting) -> None:
    """Set the directory, if the device of the same section is a disk."""
    if setting.absent or draft.value(setting.key.replace("nvme_path", "device")) != "nvme":
        return
    before = draft.strategy.get("offload", {}).get("path", setting.value)
    if before != setting.value:
        draft.remark(setting, "a directory for this kind of state alone", f"`path: {before}`")
    else:
        draft.set("strategy.offload.path", setting.value, setting)


def check_paths(draft: Draft, devices: Sequence[str]) -> None:
    """Refuse a disk without a directory.

    Raises:
        ConfigError: there is none.
    """
    for device in (draft.given[key] for key in devices if key in draft.given):
        if device.value == "nvme" and not draft.strategy.get("offload", {}).get("path"):
            raise ConfigError(
                f"{device.where}: {device} needs a directory on a disk, found none; add the "
                "nvme_path that belongs to it"
            )


def bucket(draft: Draft, setting: Setting) -> None:
    """Set the size of buckets, in MiB of the dtype that gradients have."""
    if _stage_of(draft) == 0:
        draft.remark(setting, "no effect at stage 0", "no effect")
        return
    width = LOW_BYTES if draft.low else FP32_BYTES
    mib = round(setting.number() * width / MIB, 3)
    draft.set("strategy.bucket_mib", min(max(mib, 0.001), LARGEST_BUCKET_MIB), setting)


def stage_3(draft: Draft, setting: Setting, key: str) -> None:
    """Set an option of stage 3."""
    if _stage_of(draft) < 3:
        draft.remark(setting, f"no effect at stage {_stage_of(draft)}", "no effect")
    else:
        draft.set(f"strategy.{key}", setting.whole(minimum=0), setting)


def groups(draft: Draft, setting: Setting) -> None:
    """Set the group of ranks that keeps units together until backward."""
    if setting.whole() > 1:
        stage_3(draft, setting, "reshard_after_forward")


def mics(draft: Draft, setting: Setting) -> None:
    """Choose replicas of groups of ranks, which divide the model."""
    size = int(setting.number())
    if size > 1:  # -1 turns it off
        draft.strategy.pop("name", None)
        draft.set("strategy.name", "fsdp", setting)
        draft.set("strategy.sharding", "hybrid", setting)
        draft.set("strategy.shard_size", size, setting)


def ratio(draft: Draft, setting: Setting) -> None:
    """Set the share of parameters whose optimizer's state is offloaded."""
    chosen = draft.strategy.get("offload", {})
    if setting.number() == 1 or not chosen.get("optimizer"):
        return
    if chosen.get("params"):
        draft.remark(setting, "the share of parameters updated in the store", "all of them")
    else:
        draft.set("strategy.offload.ratio", setting.number(), setting)


def store_option(draft: Draft, setting: Setting, key: str, store: str, divisor: int = 1) -> None:
    """Set an option of a store in use."""
    chosen = draft.strategy.get("offload", {})
    if store in (chosen.get("optimizer"), chosen.get("params")):
        value = setting.on if isinstance(setting.value, bool) else setting.whole() / divisor
        draft.set(f"strategy.offload.store_options.{key}", value, setting)


def threads(draft: Draft, setting: Setting) -> None:
    """Set the requests in flight: the largest of the numbers that stand for them."""
    if "nvme" in draft.strategy.get("offload", {}).values():
        before = draft.strategy["offload"].get("store_options", {}).get("threads", 1)
        if setting.whole() > before:
            draft.set("strategy.offload.store_options.threads", setting.whole(), setting)


def wire(draft: Draft, setting: Setting) -> None:
    """Set the dtype of gradients on the wire."""
    if setting.absent:
        return
    if setting.value == "fp16" and draft.value("fp16.enabled") is not True:
        draft.remark(setting, "gradients cross ranks in fp16", "`precision: fp16` needs to be on")
    elif setting.value in {"fp16", "bf16", "fp32"}:
        draft.set("dtypes.reduce", setting.value, setting)
    else:
        raise setting.wrong("fp16, bf16 or fp32")


def batch(draft: Draft, setting: Setting) -> None:
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


# --- FSDP ---


def divided(draft: Draft, setting: Setting, name: str, *arguments: Any) -> None:
    """Take another converter, unless the model stays whole."""
    if draft.name == WHOLE:
        draft.remark(setting, "no effect on a whole model", "no effect")
    else:
        _converter(name)(draft, setting, *arguments)


def sharding(draft: Draft, setting: Setting) -> None:
    """Carry over a strategy of FSDP1, which newer files call ``fsdp_reshard_after_forward``."""
    word = str(setting.value).upper()
    word = FSDP_STRATEGIES[int(word) - 1] if word in {"1", "2", "3", "4", "5"} else word
    if draft.name == WHOLE or word == "TRUE":
        return
    if word.isdecimal():
        draft.set("strategy.reshard_after_forward", int(word), setting)
        return
    if word not in {"FALSE", *FSDP_STRATEGIES}:
        raise setting.wrong(
            f"true, false, a number of ranks, or one of {', '.join(FSDP_STRATEGIES)}"
        )
    if word == "NO_SHARD":
        draft.strategy.clear()
        draft.set("strategy.name", WHOLE, setting)
    if word.startswith("HYBRID"):
        draft.set("strategy.sharding", "hybrid", setting)
    if word in {"FALSE", "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"}:
        draft.set("strategy.reshard_after_forward", False, setting)


def unit_classes(draft: Draft, setting: Setting) -> None:
    """Set the classes of units, where no policy says otherwise."""
    if not setting.absent and draft.strategy.get("units") is None:
        names = setting.value if isinstance(setting.value, str) else ",".join(setting.value)
        draft.set("strategy.units", "class", setting)
        draft.set("strategy.unit_classes", names, setting)


def unit_from(draft: Draft, setting: Setting) -> None:
    """Set the elements of a unit, where units are found by size."""
    if draft.strategy.get("units") == "size" and "unit_from" not in draft.strategy:
        draft.set("strategy.unit_from", max(1, setting.whole(minimum=0)), setting)


def prefetch(draft: Draft, setting: Setting) -> None:
    """Set how many units are whole at a time."""
    if setting.absent or setting.value == "NO_PREFETCH":
        draft.set("strategy.live_units", 1, setting)
    elif setting.value == "BACKWARD_POST":
        draft.remark(setting, "gathers a unit after the one before was freed", "live_units: 2")


# --- Megatron and parallel dimensions ---


def with_degree(draft: Draft, setting: Setting, degree: str, key: str) -> None:
    """Copy a value where a degree is above 1."""
    if degree in draft.cell:
        value = setting.on if isinstance(setting.value, bool | str) else setting.whole()
        draft.set(f"cell.{key}", value, setting)


def replicas(draft: Draft, setting: Setting) -> None:
    """Choose replicas of groups, or of whole models where no group divides the model."""
    shard_size = setting.key.replace("dp_replicate", "dp_shard")
    shards = draft.value(shard_size) or 1
    if setting.whole() == 1:
        return
    if shards == 1:
        draft.strategy.clear()
        draft.set("strategy.name", WHOLE, setting)
    else:
        draft.set("strategy.sharding", "hybrid", setting)
        draft.set("strategy.shard_size", shards, draft.given[shard_size])


# --- the top of Accelerate's files ---


def kind_of(draft: Draft) -> str:
    """Return the kind of ``distributed_type``; without this key the sections tell the kind."""
    given = draft.value("distributed_type")
    if given is not None:
        return str(given)
    tops = {key.partition(".")[0] for key in draft.given}
    return next((kind for kind, section in SECTIONS.items() if section in tops), "NO")


def precision(draft: Draft, setting: Setting) -> None:
    """Set the dtype of computation, with fp32 masters where a section is active."""
    word = "no" if setting.value in (None, False) else str(setting.value)
    if word not in {"no", "bf16", "fp16", "fp8"}:
        raise setting.wrong("no, fp16, bf16 or fp8")
    if word == "no":
        return
    before = draft.ours("precision")
    if before not in (None, word):
        raise ConfigError(
            f"{setting.where}: {setting} contradicts {before} in the file of DeepSpeed; keep one"
        )
    draft.set("precision", word, setting)
    if kind_of(draft) in SECTIONS:
        draft.low = "bf16" if word == "fp8" else word


def devices(draft: Draft, setting: Setting) -> None:
    """Remark on the choice of devices."""
    if not setting.absent and setting.value != "all":
        chosen = f"`CUDA_VISIBLE_DEVICES={setting.value} drivetrain launch ...`"
        draft.remark(setting, "which devices", chosen)


# --- hosts and ranks ---


def ranks_of_all(draft: Draft, setting: Setting) -> None:
    """Set the ranks of each host, from those of all."""
    if setting.number() < 1:  # -1 takes what the launcher finds
        return
    total = setting.whole()
    if total % draft.hosts:
        raise ConfigError(
            f"{setting.where}: {setting} contradicts num_machines: {draft.hosts}, which does not "
            "divide it; change one of them: every host runs as many ranks"
        )
    draft.set("launch.nproc_per_node", total // draft.hosts, setting)


def ranks_of_host(draft: Draft, setting: Setting) -> None:
    """Set the ranks of each host: a number, or a kind of device whose number counts."""
    if setting.value in {"gpu", "auto", "cpu"}:
        draft.set("launch.nproc_per_node", "auto", setting)
        if setting.value == "cpu":
            draft.set("launch.device", "cpu", setting)
    else:
        draft.set("launch.nproc_per_node", setting.whole(), setting)


def hosts(draft: Draft, setting: Setting) -> None:
    """Set the number of hosts, or the fewest and the most."""
    least, _, most = str(setting.value).partition(":")
    if most:
        fewest = Setting(setting.key, least, setting.where).whole()
        draft.set("launch.min_nnodes", fewest, setting)
    draft.set("launch.nnodes", Setting(setting.key, most or least, setting.where).whole(), setting)


def endpoint(draft: Draft, setting: Setting) -> None:
    """Read the place where hosts meet as an address and a port."""
    host, _, port = str(setting.value).rpartition(":")
    parts = {"master_addr": host, "master_port": port} if host else {"master_addr": port}
    draft.read({key: Setting(key, value, setting.where) for key, value in parts.items()})


def node_rank(draft: Draft, setting: Setting) -> None:
    """Set the index of this host; a variable of the shell is another one on each host."""
    if str(setting.value).startswith("$"):
        draft.remark(setting, "the index of this host", "each host takes its own `--node-rank`")
    elif draft.hosts > 1:
        if setting.whole(minimum=0) >= draft.hosts:
            raise setting.wrong(f"0 to {draft.hosts - 1} of {draft.hosts} hosts")
        draft.set("launch.node_rank", setting.whole(minimum=0), setting)


# --- command lines of other launchers ---

ZERO = "zero_optimization"

SCRIPT_OPTIONS = ("--deepspeed", "--deepspeed_config")
"""Arguments of a script that may name a file of DeepSpeed."""

DEFAULT_PORT = 29500
"""The port that torchrun, Accelerate and DeepSpeed take where none is given."""


def read_options(
    words: Sequence[str], known: Collection[str], table: Table, program: str
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
    switches = (draft.given.get(key) for key in ("bf16.enabled", "fp16.enabled"))
    low = [switch for switch in switches if switch is not None and switch.on]
    if len(low) > 1:
        raise ConfigError(
            f"{low[1].where}: {low[0]} and {low[1]} contradict each other; keep one of them"
        )
    draft.low = low[0].key.partition(".")[0] if low else ""
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

    def translate_command(self, words: Sequence[str], folder: Path) -> Translation:
        """Translate a command line, over a DeepSpeed file that the script names."""
        rows, program = self.table.options, self.programs[0][0]
        options, script = read_options(words, {row.key for row in rows}, self.table, program)
        draft = draft_of_script(script, folder, bool(options.get("module")))
        draft.read(settings(layer_of(options, {}, program), rows))
        draft.apply(rows)
        set_hosts(draft, *self.table.meeting)
        return draft.finish()


class Torchrun(TableImporter, program="torchrun"):
    """torchrun, which has no files of its own."""

    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Refuse: there are no such files."""
        raise ConfigError("expected a command line of torchrun, found a file")


class DeepSpeed(TableImporter, program="deepspeed"):
    """DeepSpeed: its JSON, and the command ``deepspeed``."""

    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Translate a JSON file."""
        return draft_of_file(layer).finish()


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
    set_hosts(draft, *table_of("accelerate").meeting)
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
