"""A translation in the making: rows of a program's table, applied to the settings of a file."""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from drivetrain.config import Layer
from drivetrain.config.document import put
from drivetrain.config.foreign import Translation
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
        return f"{self.key}: {_flow(self.value)}"

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
            values=values | self._values,
            origins=origins,
            remarks=self._remarks,
            script=self.script,
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


def _flow(value: Any) -> str:
    """Write a value on one line, as JSON does; a word without quotes."""
    return value if isinstance(value, str) else json.dumps(value)
