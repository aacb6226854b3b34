"""Reads configuration text into layers that remember their lines; knows foreign files.

YAML is read with a safe loader that knows the scalars of YAML 1.2 only: ``no`` is the string "no",
``1e-4`` is a number, ``010`` is ten, ``12:30`` is a string. Duplicate keys are errors.

Formats of other programs: the contract of an importer, and files of theirs recognised.

An importer is found by entry point (``drivetrain.formats``), as strategies are: it may name them,
the core may not. Nothing here, and nothing in an importer, imports torch.
"""

import math
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import yaml

from drivetrain.config.schema import RunConfig, options_of
from drivetrain.errors import ConfigError, refusing
from drivetrain.registry import formats

# --- reads configuration text into layers of values that remember where they were written ---

Kind: TypeAlias = Literal["default", "environment", "file", "command line", "code"]

MAX_BYTES = 1 << 20
"""A larger file is not a configuration: it is refused before it is parsed."""

MAX_NODES, MAX_DEPTH = 20_000, 40
"""Keys and values of a configuration, and how deep they lie: more would explode by aliases."""

ORIGINS_KEY = "resolved_from"
"""Key under which ``drivetrain launch`` writes where each value of a resolved file came from."""


STRATEGY = "strategy"
"""The key of the strategy: its name alone, or a section of its name and options."""

OWN_KEYS = frozenset({STRATEGY, "launch"})
"""Keys that no file of another program has."""

_WORDS: Mapping[str, tuple[str, ...]] = {
    STRATEGY: ("name",),
    "links.far": ("gradients", "parameters"),
}
"""Sections that one word may stand for: the word is then the value of these keys of the section."""

YAML_INDENT = 2
"""Columns by which the writer of YAML indents a nested mapping."""

COMMENT_COLUMNS = 80
"""Columns that a line with a comment may take."""


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """Where a value came from: its kind decides about conflicts, its text is shown to the user."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Layer:
    """Nested values, and the origin of each by dotted key."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, ValueOrigin] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Any, ValueOrigin]]) -> "Layer":
        """Make a layer of dotted keys, their values and origins."""
        values: dict[str, Any] = {}
        origins: dict[str, ValueOrigin] = {}
        for key, value, origin in entries:
            put(values, key, value)
            origins[key] = origin
        return cls(values, origins)


class _YamlLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$",
        "-+0123456789.",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", [*"~nN\0", ""]),
):
    _YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
_YamlLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(str(node.value), 10))


def read_file(path: str | Path) -> Layer:
    """Read one YAML file as a layer.

    Raises:
        ConfigError: the file is missing, too large, not YAML, not a mapping, or repeats a key; the
            message names the file and the line.
    """
    path = Path(path)
    way_out = "write one with 'drivetrain config --output PATH'"
    with refusing(f"cannot read the configuration {path}", way_out):
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                f"{path}: expected a configuration of at most {MAX_BYTES} bytes, "
                f"found {size}; is this the right file?"
            )
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):  # JSON may be indented by tabs, YAML may not
            text = text.expandtabs()
    node = _compose(text, path)
    if node is None:
        return Layer()
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1}: expected a mapping of keys to values such as "
            f"'precision: bf16', found a "
            f"{'list' if isinstance(node, yaml.SequenceNode) else 'single value'}"
        )
    lines = dict(_lines(node, path))
    values = _construct(node)
    return _without_recorded_origins(
        Layer(values, {key: ValueOrigin("file", f"{path}:{line}") for key, line in lines.items()}),
        path,
    )


def read_sets(assignments: Iterable[str]) -> Layer:
    """Read ``key=value`` assignments of the command line; the value is a YAML scalar or flow node.

    Raises:
        ConfigError: an assignment has no ``=``, its value is not YAML, or two contradict each
            other.
    """
    entries: list[tuple[str, Any, ValueOrigin]] = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key):
            raise ConfigError(
                f"--set expects KEY=VALUE such as precision=bf16, found {assignment!r}"
            )
        node = _compose(text, Path("--set " + key))
        value = None if node is None else _construct(node)
        inside = _WORDS.get(key, ()) if isinstance(value, str) else ()
        for dotted in [f"{key}.{each}" for each in inside] or [key]:
            for other, before, origin in entries:
                if other == dotted and before != value:
                    raise ConfigError(
                        f"{dotted}: '{origin.text}' and '--set {assignment}' contradict each "
                        "other; keep one"
                    )
            entries.append((dotted, value, ValueOrigin("command line", f"--set {assignment}")))
    return Layer.of(entries)


def with_words_as_sections(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values in which no word stands for a section any more."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, str) and dotted in _WORDS:
            found[key] = dict.fromkeys(_WORDS[dotted], value)
        elif isinstance(value, Mapping) and any(word.startswith(f"{dotted}.") for word in _WORDS):
            found[key] = with_words_as_sections(value, f"{dotted}.")
        else:
            found[key] = value
    return found


def dump_yaml(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Write nested values as YAML that ``read_file`` reads back equal.

    Args:
        values: nested.
        comments: on dotted keys: beside the value where the line has room, else above it.
    """
    text = yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=False, width=math.inf)
    return text if not comments else "".join(_commented(text, comments))


def _commented(text: str, comments: Mapping[str, str]) -> Iterable[str]:
    """Yield the lines of block YAML without lists, with comments on their keys."""
    above: list[str] = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        above = [*above[: len(indent) // YAML_INDENT], line.strip().partition(":")[0]]
        comment = comments.get(".".join(above), "")
        beside = f"{line}  # {comment}" if comment else line
        if len(beside) <= COMMENT_COLUMNS:
            yield beside + "\n"
            continue
        width = COMMENT_COLUMNS - len(indent)
        for part in textwrap.wrap(comment, width - len("# "), break_long_words=False):
            yield f"{indent}# {part}\n"
        yield line + "\n"


def put(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key in nested dicts, making the dicts on the way."""
    *parents, last = dotted.split(".")
    for parent in parents:
        inner = values.get(parent)
        if isinstance(inner, str) and parent == STRATEGY:
            inner = {"name": inner}
        if not isinstance(inner, dict):
            inner = {}
        values[parent] = inner
        values = inner
    values[last] = value


def _compose(text: str, path: Path) -> yaml.Node | None:
    try:
        node: yaml.Node | None = _YamlLoader(text).get_single_node()
        _check_extent(node, path)
    except RecursionError:
        raise ConfigError(f"{path}: expected at most {MAX_DEPTH} levels, found more") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(
            f"{path}{line}: expected {kind}; the parser says: "
            f"{getattr(error, 'problem', None) or error}"
        ) from error
    return node


def _check_extent(root: yaml.Node | None, path: Path) -> None:
    """Refuse aliases that repeat each other without end, and documents that are too deep."""
    waiting = [(root, 0)] if root is not None else []
    met = 0
    while waiting:
        node, depth = waiting.pop()
        met += 1
        if met > MAX_NODES or depth > MAX_DEPTH:
            raise ConfigError(
                f"{path}:{node.start_mark.line + 1}: expected at most {MAX_NODES} keys and values "
                f"in {MAX_DEPTH} levels, aliases counted where they stand, found more; is this "
                "the right file?"
            )
        if isinstance(node, yaml.MappingNode):
            waiting += [(each, depth + 1) for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(each, depth + 1) for each in node.value]


def _construct(node: yaml.Node) -> Any:
    try:
        return _YamlLoader("").construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or node.start_mark
        raise ConfigError(
            f"line {mark.line + 1}: expected plain values, found {getattr(error, 'problem', error)}"
        ) from error
    except ValueError as error:  # an integer of more digits than python reads
        raise ConfigError(f"expected plain values, found a number too long: {error}") from error


def _lines(node: yaml.MappingNode, path: Path, prefix: str = "") -> Iterable[tuple[str, int]]:
    """Yield (dotted key, line) of every key, and refuse a key that is there twice."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(
                f"{path}:{line}: {prefix}{key} is given twice (first on line {seen[key]}); keep one"
            )
        seen[key] = line
        yield prefix + key, line
        if isinstance(value_node, yaml.MappingNode):
            yield from _lines(value_node, path, f"{prefix}{key}.")


def _without_recorded_origins(layer: Layer, path: Path) -> Layer:
    """Take the recorded origins out of a file that ``drivetrain launch`` resolved."""
    if ORIGINS_KEY not in layer.values:
        return layer
    values = dict(layer.values)
    recorded = values.pop(ORIGINS_KEY)
    if not isinstance(recorded, Mapping) or not all(
        isinstance(entry, list) and len(entry) == 2 for entry in recorded.values()
    ):
        raise ConfigError(f"{path}: {ORIGINS_KEY} is written by 'drivetrain launch'; remove it")
    origins = {key: ValueOrigin(*entry) for key, entry in recorded.items()}
    return Layer(_chosen(values, origins), origins)


def _chosen(
    values: Mapping[str, Any], origins: Mapping[str, ValueOrigin], prefix: str = ""
) -> dict[str, Any]:
    """Keep the values that somebody chose: a default must not hide a weaker layer's choice."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inner = _chosen(value, origins, dotted + ".")
            if dotted in origins and "name" in value:  # a strategy that was given by its name alone
                inner = {"name": value["name"], **inner}
            if inner:
                kept[key] = inner
        elif dotted in origins:
            kept[key] = value
    return kept


# --- formats of other programs ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A configuration of another program in the words of ours.

    Attributes:
        values: nested, as a configuration file has them.
        origins: the foreign setting behind each dotted key, such as ``zero_stage: 3``.
        remarks: a sentence for each foreign setting that no key stands for: its effect there, and
            the way to have it here.
        script: the training script and its arguments, of a command line.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    script: Sequence[str] = ()

    def to_yaml(self, source: str) -> str:
        """Return a commented configuration file.

        Args:
            source: what was translated, for the first line.
        """
        lines = [f"# Imported from {source}."]
        if self.values:
            lines.append(dump_yaml(self.values, self.origins).rstrip())
        if self.remarks:
            lines += ["", "# Settings that no key stands for:"]
            lines += [f"#   {remark}" for remark in self.remarks]
        return "\n".join(lines) + "\n"


class Importer(ABC):
    """Translates the files and the command lines of one other program.

    Attributes:
        title: of a file, with its article, such as ``a DeepSpeed configuration``; "" where the
            program has no files of its own.
        programs: the words with which a command line of the program may start.
        flags: our counterpart of each option of the program's command line that we lack.
    """

    title: ClassVar[str] = ""
    programs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    flags: ClassVar[Mapping[str, str]] = {}

    def recognizes(self, values: Mapping[str, Any]) -> bool:
        """Return whether the values of a file are those of this program; False by default."""
        return False

    @abstractmethod
    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Translate a file.

        Args:
            layer: its values, with the lines of its keys.
            folder: of the file, in which files that it names may lie.

        Raises:
            ConfigError: one line for each key that the program does not know, or for settings that
                contradict each other.
        """

    @abstractmethod
    def translate_command(self, words: Sequence[str], folder: Path) -> Translation:
        """Translate a command line.

        Args:
            words: those after the program's.
            folder: in which it is run.

        Raises:
            ConfigError: an option that the program does not know, or settings that contradict each
                other.
        """


def importers() -> Iterator[Importer]:
    """Make every installed importer."""
    registry = formats()
    for name in registry.names:
        importer: Importer = registry.load(name)()
        yield importer


def importer_of(values: Mapping[str, Any]) -> Importer | None:
    """Return the importer of a file's values; None where they may be ours."""
    ours = {STRATEGY, *(knob.name for knob in options_of(RunConfig))}
    if set(values) <= ours or not OWN_KEYS.isdisjoint(values):
        return None
    return next((each for each in importers() if each.recognizes(values)), None)


def read_own_file(path: str | Path) -> Layer:
    """Read a configuration file of ours.

    Raises:
        ConfigError: the file cannot be read, or is another program's; the message says how to
            import it.
    """
    layer = read_file(path)
    importer = importer_of(layer.values)
    if importer is not None:
        raise ConfigError(
            f"{path}: expected a configuration of drivetrain, found {importer.title}; translate it "
            f"once with: drivetrain config import {path} --output drivetrain.yaml"
        )
    return layer
