"""Merges the layers of configuration into one typed run, and says where each value came from.

Precedence: code > command line > file > default. Code and command line are both meant for this very
run: if they contradict each other, an error quotes both.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args, get_origin

from drivetrain.config.document import (
    ORIGINS_KEY,
    STRATEGY,
    Layer,
    ValueOrigin,
    dump_yaml,
    with_words_as_sections,
)
from drivetrain.config.schema import NestedStrategy, Option, RunConfig, is_union, options_of
from drivetrain.errors import ConfigError, UnknownPluginError
from drivetrain.registry import strategies

FindConfig: TypeAlias = Callable[[str], tuple[str, type]]
"""Maps a strategy's name ("" for the default one) to its full name and its Config dataclass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A validated configuration with the origin of every value.

    Attributes:
        run: the core's knobs.
        strategy: the name of the strategy.
        strategy_config: the strategy's own Config object.
        origins: where each dotted key came from; keys at their default are absent.
    """

    run: RunConfig
    strategy: str
    strategy_config: Any
    origins: Mapping[str, ValueOrigin]

    def rows(self) -> Iterator[tuple[str, Any, ValueOrigin]]:
        """Yield (dotted key, value, origin) of every knob, the strategy's first."""
        default = ValueOrigin("default", "default")
        for key, value in flattened(self.to_dict()):
            yield key, value, self.origins.get(key, default)

    def to_dict(self) -> dict[str, Any]:
        """Return the nested values as plain types, ready for YAML."""
        strategy = {"name": self.strategy, **plain(self.strategy_config)}
        return {STRATEGY: strategy, **plain(self.run)}

    def to_yaml(self, *, with_origins: bool = False) -> str:
        """Return the configuration as YAML; with origins it can stand for the whole command."""
        values = self.to_dict()
        if with_origins:
            values[ORIGINS_KEY] = {
                key: [origin.kind, origin.text] for key, origin in self.origins.items()
            }
        return dump_yaml(values)


def resolve(
    *layers: Layer, find_config: FindConfig | None = None, complete: bool = True
) -> Resolved:
    """Merge layers, later ones winning, and validate the result.

    Args:
        layers: from the weakest to the strongest, for example file, command line, code.
        find_config: maps the strategy's name to its Config class; None: among those installed.
        complete: False where further values are still to come: options are judged one by one.

    Raises:
        ConfigError: with one line for every wrong or unknown key, or for a conflict between code
            and command line.
    """
    values: dict[str, Any] = {}
    origins: dict[str, ValueOrigin] = {}
    for layer in layers:
        _merge(values, origins, layer)
    section = values.pop(STRATEGY, None)
    validation = _Validation(origins, find_config or strategies().find_config, complete)
    strategy = validation.strategy({} if section is None else section, f"{STRATEGY}.")
    run = validation.build(RunConfig, values, "", also_valid=(STRATEGY,))
    if validation.problems:
        only_unknown = validation.unknown is not None and len(validation.problems) == 1
        kind = UnknownPluginError if only_unknown else ConfigError
        raise kind("\n".join(sorted(validation.problems, key=_line)))
    return Resolved(
        run=run, strategy=strategy.name, strategy_config=strategy.options, origins=origins
    )


def _line(problem: str) -> int:
    """Return the line of a file that a problem begins with; 0 for other origins."""
    found = re.match(r"[^ ]+?:(\d+): ", problem)
    return int(found[1]) if found else 0


def checked_options(cls: type, values: Mapping[str, Any], key: str) -> Any:
    """Return an object of an options dataclass, whose values a key of the configuration holds.

    Args:
        cls: the dataclass.
        values: its values, nested.
        key: of the configuration, for errors.

    Raises:
        ConfigError: with one line for every wrong or unknown value.
    """
    validation = _Validation({}, strategies().find_config, complete=True)
    found = validation.build(cls, values, f"{key}.")
    if validation.problems:
        raise ConfigError("\n".join(validation.problems))
    return found


def _merge(values: dict[str, Any], origins: dict[str, ValueOrigin], layer: Layer) -> None:
    """Lay one layer over the values; a strategy of another name drops the options below it."""
    incoming = with_words_as_sections(layer.values)
    above = incoming.get(STRATEGY)
    below = values.get(STRATEGY)
    if isinstance(above, Mapping) and isinstance(below, dict):
        name = above.get("name", below.get("name"))
        if name != below.get("name", name):
            _refuse_conflict(STRATEGY + ".name", below.get("name"), name, origins, layer)
            values.pop(STRATEGY)
            for key in [key for key in origins if key.split(".")[0] == STRATEGY]:
                del origins[key]
    _overlay(values, incoming, "", origins, layer)
    origins.update(layer.origins)
    for key, _ in flattened(incoming):
        # A section may be given as one value: each knob in it then came from there, and no other.
        origin = _find(layer.origins, key)
        if origin is not None:
            origins[key] = origin


def _overlay(
    values: dict[str, Any],
    incoming: Mapping[str, Any],
    prefix: str,
    origins: Mapping[str, ValueOrigin],
    layer: Layer,
) -> None:
    for key, value in incoming.items():
        dotted = f"{prefix}{key}"  # refused later, if it is no text
        if isinstance(value, Mapping):
            below = values.get(key)  # a name alone stands for a strategy without options
            below = {"name": below} if isinstance(below, str) else below
            values[key] = dict(below) if isinstance(below, Mapping) else {}
            _overlay(values[key], value, dotted + ".", origins, layer)
        else:
            if key in values:
                _refuse_conflict(dotted, values[key], value, origins, layer)
            values[key] = value


def _refuse_conflict(
    key: str, below: Any, above: Any, origins: Mapping[str, ValueOrigin], layer: Layer
) -> None:
    """Raise when code contradicts the command line."""
    mine, theirs = _find(layer.origins, key), _find(origins, key)
    if below == above or mine is None or theirs is None:
        return
    if (mine.kind, theirs.kind) == ("code", "command line"):
        raise ConfigError(
            f"{key}: the script says {above!r} in {mine.text}, the command line says {below!r} in "
            f"'{theirs.text}'; remove one of them"
        )


@dataclass
class _Validation:
    """Builds configuration objects, with one line in ``problems`` for each thing that is wrong.

    A dataclass may have a method ``check``, which raises ConfigError on options that contradict
    each other.

    Attributes:
        origins: where each dotted key came from.
        find_config: maps a strategy's name to its Config class.
        complete: whether options are judged together, too.
    """

    origins: Mapping[str, ValueOrigin]
    find_config: FindConfig
    complete: bool
    problems: list[str] = field(default_factory=list)
    unknown: UnknownPluginError | None = None

    def build(
        self,
        cls: type,
        values: Mapping[str, Any],
        prefix: str,
        also_valid: tuple[str, ...] = (),
    ) -> Any:
        """Return an object of a configuration dataclass; None when something is wrong.

        Args:
            cls: the dataclass.
            values: its values, nested.
            prefix: of its keys, with the dot.
            also_valid: further keys to name in hints.
        """
        before = len(self.problems)
        try:
            result = self._object(cls, values, prefix, also_valid)
        except ConfigError as error:
            self._problem(prefix.removesuffix("."), str(error))
            return None
        if self.complete and result is not None:
            self._check_together(result, prefix)
        return result if len(self.problems) == before else None

    def strategy(self, section: Any, prefix: str, usual: str = "") -> NestedStrategy:
        """Return the strategy that a section names, with its options.

        Args:
            section: a name, or options with or without one.
            prefix: of its keys, with the dot.
            usual: the name if the section has none; "" for the default strategy.
        """
        section = {"name": section} if isinstance(section, str) else section
        if not isinstance(section, Mapping) or not isinstance(section.get("name", ""), str):
            expected = "expected a name or a mapping such as {name: NAME, option: value}"
            self._problem(prefix.removesuffix("."), f"{expected}, found {section!r}")
            return NestedStrategy()
        try:
            name, config_class = self.find_config(section.get("name") or usual)
        except UnknownPluginError as error:
            self.unknown = error
            self.problems.append(f"{_where(self.origins, f'{prefix}name')}: {error}")
            return NestedStrategy()
        options = {key: value for key, value in section.items() if key != "name"}
        return NestedStrategy(name, self.build(config_class, options, prefix))

    def _object(
        self, cls: type, values: Mapping[str, Any], prefix: str, also_valid: tuple[str, ...] = ()
    ) -> Any:
        """Return an object of the known keys; None where a value has not the type of its knob."""
        knobs = {knob.name: knob for knob in options_of(cls)}
        known: dict[str, Any] = {}
        fits = True
        for knob in knobs.values():
            if knob.is_strategy:
                nested = values.get(knob.name, {})
                usual = knob.default.name
                known[knob.name] = self.strategy(nested, f"{prefix}{knob.name}.", usual)
        for key, value in values.items():
            dotted = prefix + str(key)
            if key not in knobs:
                self._unknown(str(key), prefix, also_valid, knobs)
            elif knobs[key].is_strategy:
                continue
            elif not knobs[key].is_section:
                try:
                    known[key] = _typed(knobs[key].type, value)
                    message = _limit_broken(knobs[key], known[key])
                except _MISFITS:
                    message, fits = f"expected {_in_words(knobs[key].type)}", False
                if message:
                    self._problem(dotted, f"{message}, found {value!r}")
            elif isinstance(value, Mapping):
                known[key] = self._object(knobs[key].type, value, dotted + ".")
                fits = fits and known[key] is not None
            else:
                self._problem(dotted, f"expected a mapping, found {value!r}")
        return cls(**known) if fits else None

    def _unknown(
        self, key: str, prefix: str, also_valid: Sequence[str], knobs: Mapping[str, Option]
    ) -> None:
        valid = [*also_valid, *knobs]
        near = difflib.get_close_matches(key, valid, n=1)
        for knob in knobs.values():  # a key that belongs elsewhere, or is a value
            if knob.is_section and any(inner.name == key for inner in options_of(knob.type)):
                near = [f"{knob.name}: {{{key}: VALUE}}"]
            elif key in knob.choices:
                near = [f"{knob.name}: {key}"]
        listed = f"valid keys: {', '.join(valid)}"
        if any(listed in problem for problem in self.problems):
            listed = "valid keys: as listed above"
        hint = f"did you mean {near[0]!r}?" if near else listed
        section, dot, inner = key.partition(".")
        if owners := self._owners(key) if prefix in ("", f"{STRATEGY}.") else []:
            hint = f"strategies with this option: {', '.join(owners)}"
            hint += "" if prefix else f"; write it as {STRATEGY}: {{name: NAME, {key}: VALUE}}"
        elif dot:
            hint = f"write it nested, as {section}: {{{inner}: VALUE}}"
        where = _where(self.origins, prefix + key)
        self.problems.append(f"{where}: unknown key {prefix}{key}; {hint}")

    def _owners(self, key: str) -> list[str]:
        """Return the installed strategies that have an option."""
        found, registry = [], strategies()
        for name in registry.names:
            with suppress(ConfigError):  # a broken plugin
                if any(knob.name == key for knob in options_of(registry.find_config(name)[1])):
                    found.append(name)
        return found

    def _check_together(self, config: Any, prefix: str) -> None:
        """Report the contradictions in a dataclass and in its sections."""
        for knob in options_of(config.__class__):
            if knob.is_section:
                self._check_together(getattr(config, knob.name), f"{prefix}{knob.name}.")
        check = getattr(config, "check", None)
        if callable(check):
            try:
                check()
            except ConfigError as error:
                self._problem(prefix.removesuffix("."), str(error))

    def _problem(self, key: str, message: str) -> None:
        self.problems.append(f"{_where(self.origins, key)}: {key}: {message}")


def plain(config: Any) -> dict[str, Any]:
    """Return a configuration object as nested plain values, as YAML writes them."""
    return {knob.name: _plain(getattr(config, knob.name)) for knob in options_of(config.__class__)}


def _plain(value: Any) -> Any:
    if isinstance(value, NestedStrategy):
        options = {} if value.options is None else plain(value.options)
        return {"name": value.name, **options}
    if dataclasses.is_dataclass(value):
        return plain(value)
    return dict(value) if isinstance(value, Mapping) else value


def _limit_broken(knob: Option, value: Any) -> str:
    if knob.minimum is not None and type(value) in (int, float) and not value >= knob.minimum:
        return f"expected at least {knob.minimum:g}"
    if knob.maximum is not None and type(value) in (int, float) and not value <= knob.maximum:
        return f"expected at most {knob.maximum:g}"
    return ""


_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
_TYPES_IN_WORDS = {
    bool: "a valid boolean",
    int: "a valid integer",
    float: "a valid number",
    str: "a valid string",
}
_MAPPINGS = (dict, Mapping)
_MISFITS = (ValueError, TypeError, OverflowError, LookupError)
"""What is raised where a value is not of a type: by Python's types and tables, too."""


def _typed(kind: Any, value: Any) -> Any:  # noqa: PLR0911 - a way for each type
    """Return a value as the type of a knob: numbers and booleans may be written as text.

    Raises:
        ValueError: or another one of ``_MISFITS``: it does not stand for such a value.
    """
    if type(value) is kind or (is_union(kind) and type(value) in get_args(kind)):
        return value
    if kind is bool:
        return _BOOLEANS[str(value).lower()]
    if kind in (int, float) and not isinstance(value, bool):
        number = kind(value)
        if isinstance(value, str) or number == value:
            return number
    elif kind is str and isinstance(value, str):
        return str.__str__(value)  # of a member of an enum, too
    elif get_origin(kind) is Literal:
        choices = get_args(kind)
        return choices[choices.index(value)]
    elif is_union(kind):
        for member in get_args(kind):
            with suppress(*_MISFITS):
                return _typed(member, value)
    elif get_origin(kind) in _MAPPINGS and isinstance(value, Mapping):
        names, values = get_args(kind)
        return {_typed(names, name): _typed(values, each) for name, each in value.items()}
    raise ValueError(value)


def _in_words(kind: Any) -> str:
    """Return what a knob of a type expects."""
    members = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(", ".join(map(repr, members)).rsplit(", ", 1))
    if is_union(kind):
        return " or ".join(_in_words(member) for member in members if member is not type(None))
    if get_origin(kind) in _MAPPINGS:
        return f"a mapping to {_in_words(members[1])}"
    return _TYPES_IN_WORDS.get(kind, str(kind))


def _where(origins: Mapping[str, ValueOrigin], key: str) -> str:
    origin = _find(origins, key)
    if origin is None:
        # An unknown section is known by the values inside.
        inside = (found for name, found in origins.items() if name.startswith(f"{key}."))
        origin = next(inside, None)
    return origin.text if origin else "configuration"


def _find(origins: Mapping[str, ValueOrigin], key: str) -> ValueOrigin | None:
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return None


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, by names with a dot between the keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
