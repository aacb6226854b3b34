"""``drivetrain config explain``: the meaning of a key, or of all keys of a section."""

import difflib
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from drivetrain.config import Option, RunConfig, options_of
from drivetrain.config.document import STRATEGY
from drivetrain.config.option import is_union
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch.commands.options import FLAGS, described_strategies
from drivetrain_launch.tables import yaml_text

COLUMNS = 80
"""Columns of a line of text."""

WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
}
"""How the values of a type are described."""


def explained(key: str) -> str:
    """Return the text about a key, a section, a strategy or ``strategy.OPTION``.

    Strategies are imported where their options are asked for, and not before.

    Raises:
        ConfigError: there is no such key; the message names the nearest.
    """
    sections = dict(_sections(RunConfig, ""))
    knobs = {f"{prefix}{k.name}": k for prefix, cls in sections.items() for k in options_of(cls)}
    if key == STRATEGY:
        lines = [f"  {name}: {summary}" for name, summary in described_strategies()]
        flag = "--strategy NAME, or the key strategy: a name, or a mapping of name and options"
        return "\n".join([f"The strategy of a run: {flag}. Installed:", *lines])
    if f"{key}." in sections:
        return _listed(knobs[key].help, sections[f"{key}."])
    if key in knobs:
        return _explained(key, knobs[key])
    if key in strategies().names:
        kind = strategies().load(key)
        return _listed(f"{key}: {kind.summary}.", kind.Config)
    if key.startswith(f"{STRATEGY}."):
        return _of_strategies(key.removeprefix(f"{STRATEGY}."))
    valid = [*knobs, STRATEGY, *strategies().names]
    near = difflib.get_close_matches(key, valid, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "'drivetrain config show' lists all keys"
    raise ConfigError(f"unknown key {key!r}; {hint}")


def values_of(knob: Option) -> str:
    """Return in words which values a knob takes."""
    members = typing.get_args(knob.type) if is_union(knob.type) else (knob.type,)
    words = []
    for member in members:
        if typing.get_origin(member) is Literal:
            words += [yaml_text(value) for value in typing.get_args(member)]
        elif knob.is_strategy:
            words.append("the name of a strategy, or a mapping of name and options")
        else:
            words.append(WORDS.get(member, "a mapping"))
    limits = [f"at least {knob.minimum:g}"] if knob.minimum is not None else []
    limits += [f"at most {knob.maximum:g}"] if knob.maximum is not None else []
    return " or ".join(words) + (f", {' and '.join(limits)}" if limits else "")


def _explained(key: str, knob: Option) -> str:
    facts = {"values": values_of(knob), "default": _default(knob)}
    for flag in FLAGS:
        if flag.key == key:
            facts["flag"] = flag.names[0]
    lines = [f"  {name:8} {text}" for name, text in facts.items()]
    return "\n".join([textwrap.fill(f"{key}: {knob.help}", COLUMNS), *lines])


def _listed(title: str, cls: type) -> str:
    """Return a paragraph about each key of a section."""
    lines = [title]
    for knob in options_of(cls):
        text = f"{knob.name} ({_default(knob)}): {knob.help}"
        lines.append(textwrap.fill(text, COLUMNS, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


def _of_strategies(name: str) -> str:
    """Return the texts about an option of that name, with the strategies that share each text."""
    registry, texts, known = strategies(), dict[str, list[str]](), set[str]()
    for strategy in registry.names:
        for prefix, cls in _sections(registry.load(strategy).Config, ""):
            for knob in options_of(cls):
                known.add(prefix + knob.name)
                if prefix + knob.name == name:
                    text = _explained(f"{STRATEGY}.{name}", knob)
                    texts.setdefault(text, []).append(strategy)
    if not texts:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {f'{STRATEGY}.{near[0]}'!r}?" if near else "see its documentation"
        raise ConfigError(f"no installed strategy has an option {name!r}; {hint}")
    return "\n\n".join(f"{text}\n  of       {', '.join(names)}" for text, names in texts.items())


def _sections(cls: type, prefix: str) -> Iterator[tuple[str, type]]:
    """Yield the prefix and the dataclass of a section and of all sections inside."""
    yield prefix, cls
    for knob in options_of(cls):
        if knob.is_section:
            yield from _sections(knob.type, f"{prefix}{knob.name}.")


def _default(knob: Option) -> str:
    if knob.is_section:
        return "a section"
    if knob.is_strategy:
        return str(knob.default.name or "the default strategy")
    return yaml_text(knob.default)
