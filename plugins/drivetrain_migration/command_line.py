"""Options of another program's command line, read as its own parser would, and then its script."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.config import Layer, ValueOrigin, read_file
from drivetrain.config.document import put
from drivetrain.errors import ConfigError
from drivetrain_migration.deepspeed import draft_of
from drivetrain_migration.draft import Draft, Setting

SCRIPT_OPTIONS = ("--deepspeed", "--deepspeed_config")
"""Arguments of a script that may name a file of DeepSpeed."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The options before a script, and the script with its arguments.

    Attributes:
        options: value by name, with ``_`` for ``-`` and without dashes; True for a switch.
        script: the words from the script on.
    """

    options: Mapping[str, Any]
    script: tuple[str, ...]

    def layer(self, keys: Mapping[str, str], program: str) -> Layer:
        """Return the options as the values of a file.

        Args:
            keys: dotted key of an option; an option that is absent has its own name for a key.
            program: whose options they are, for messages.
        """
        values: dict[str, Any] = {}
        origins = {}
        for name, value in self.options.items():
            key = keys.get(name, name)
            put(values, key, value)
            origins[key] = ValueOrigin("command line", f"{program} --{name}")
        return Layer(values, origins)


def read_options(
    words: Sequence[str],
    valued: set[str],
    switches: set[str],
    short: Mapping[str, str],
    program: str,
) -> CommandLine:
    """Divide the words of a command line into its options and its script.

    Args:
        words: those after the program's.
        valued: options with a value.
        switches: options without one.
        short: long names of one-letter options.
        program: for messages.

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
        name = short.get(name, name.lstrip("-").replace("-", "_"))
        if name in switches:
            options[name] = True
        elif name not in valued:
            raise ConfigError(f"{program}: unknown option {word}; remove it from the line")
        elif not equals and not rest:
            raise ConfigError(f"{program}: expected a value after {word}, found none")
        else:
            options[name] = scalar(value if equals else rest.pop(0))
    return CommandLine(options, tuple(rest))


def scalar(text: str) -> Any:
    """Return the number or truth value that a word of a command line stands for, else the word."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def script_draft(script: Sequence[str], folder: Path) -> tuple[Draft, tuple[str, ...]]:
    """Return the draft of the DeepSpeed file that a script's arguments name, and the others.

    Raises:
        ConfigError: the file cannot be read or translated.
    """
    for position, word in enumerate(script):
        name, equals, value = word.partition("=")
        after = value if equals else next(iter(script[position + 1 :]), "")
        if name in SCRIPT_OPTIONS and after.endswith(".json"):
            draft = draft_of(read_file(folder / after))
            draft.remark(
                Setting(name, after, ""), "an argument of the script", "left out: this file has it"
            )
            rest = (*script[:position], *script[position + (1 if equals else 2) :])
            return draft, tuple(each for each in rest if each != SCRIPT_OPTIONS[0])
    return Draft({}), tuple(script)


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


DEFAULT_PORT = 29500
"""The port that torchrun, Accelerate and DeepSpeed take where none is given."""
