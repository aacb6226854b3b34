"""The one tree of errors; each leaf carries the exit code that ``drivetrain launch`` ends with.

::

    DrivetrainError            1
    ├── ConfigError            2   a value, key, option or file of the configuration
    │   └── UnknownPluginError 2   a strategy, store or tracker that is not installed
    ├── UsageError             1   the training script used the library in a way that cannot work
    ├── PreflightError         3   the machine or the ranks are not fit to start
    │   └── RankMismatchError  3   ranks disagree on the configuration, the model or a shape
    ├── CheckpointError        4   a checkpoint that cannot be written, read or trusted
    ├── CollectiveError        5   a collective that failed or timed out
    ├── StorageError           7   a store that has no room, or cannot be read or written
    └── NonFiniteError         9   an infinite or NaN loss or gradient, at which the run stops

Every message names the expected and the found thing, and the way out.
"""

import collections.abc
import json
import os
import pathlib
import re
from contextlib import contextmanager
from typing import ClassVar


def in_words(error: Exception) -> str:
    """Return in words why something cannot be read or reached, without numbers and codecs."""
    if isinstance(error, UnicodeDecodeError):
        found = error.object[error.start]
        return f"expected text in UTF-8, found the byte 0x{found:02x} at {error.start}"
    if isinstance(error, json.JSONDecodeError):
        rest = error.doc[error.pos :].split()
        what = repr(rest[0][:20]) if rest else "the end of the text"
        return f"expected JSON, found {what} in line {error.lineno}, column {error.colno}"
    if isinstance(error, OSError) and type(error).__module__ != "ssl":  # numbers of its own
        numbers = [error.errno or 0]
        if numbers[0] <= 0:  # of several addresses, or of a name: these have numbers of their own
            numbers = [int(each) for each in re.findall(r"\[Errno (\d+)\]", str(error))]
        said = ", ".join(dict.fromkeys(map(os.strerror, numbers)))
        return said or error.strerror or str(error) or "no answer"
    if isinstance(error, KeyError):
        return f"expected the key {error}, found none"
    return str(error) or type(error).__name__


def expected(messages: list[str]) -> str:
    """Say in our words which values pydantic expected: a message for each member of a union."""
    wanted = [re.sub(r", (unable|got) .*", "", message) for message in messages]
    wanted = [re.sub(r"valid dictionary( or instance of \w+)?", "mapping", each) for each in wanted]
    text = " or ".join(wanted).replace("Input should be", "expected").replace(" or expected", " or")
    for theirs, ours in _PYDANTIC.items():
        text = text.replace(theirs, ours)
    return text


_PYDANTIC = {
    "Value error, ": "",
    "Field required": "expected a value",
    "Extra inputs are not permitted": "unknown key",
    "Invalid JSON: ": "expected JSON, but ",
}


class DrivetrainError(Exception):
    """Root of every error that the library raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(DrivetrainError):
    """The configuration is wrong; the message names file, line and nearest key."""

    exit_code = 2


@contextmanager
def refusing(what: str, way_out: str) -> collections.abc.Iterator[None]:
    """Context in which what the system, or the form of a text, refuses is a wrong configuration.

    Args:
        what: was expected, or cannot be done.
        way_out: for the user.

    Raises:
        ConfigError: the block has raised an OSError or a ValueError.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {in_words(error)}; {way_out}") from error


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file that a command's option names.

    Raises:
        ConfigError: it cannot be written.
    """
    with refusing(f"cannot write {str(path)!r}", "choose another file"):
        path.write_text(text, encoding="utf-8")


def replace_text(path: pathlib.Path, text: str) -> None:
    """Write a file as a whole: whoever reads it meanwhile finds the text of before.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


class UnknownPluginError(ConfigError):
    """Nothing installed provides a plugin of this name; the message lists the installed ones."""


class UsageError(DrivetrainError, ValueError):
    """The training script asked for something that cannot be done, and how to ask instead."""


class PreflightError(DrivetrainError):
    """The run cannot start: a busy port, too few devices, a missing file."""

    exit_code = 3


class RankMismatchError(PreflightError):
    """Ranks that must agree do not; the message shows the value of each rank."""


class CheckpointError(DrivetrainError):
    """A checkpoint could not be written, read or trusted; nothing that existed was lost."""

    exit_code = 4


class CollectiveError(DrivetrainError):
    """A collective failed or timed out; the message names operation, sequence number and ranks."""

    exit_code = 5


class NonFiniteError(DrivetrainError, ArithmeticError):
    """A loss or a gradient is not finite; the message names step, ranks and parameter."""

    exit_code = 9


class StorageError(DrivetrainError):
    """A store has no room, or cannot be read or written; the message names path and bytes."""

    exit_code = 7
