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

from pathlib import Path
from typing import ClassVar


def unreadable(error: Exception) -> str:
    """Return in words why a text file cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        found = error.object[error.start]
        return f"expected text in UTF-8, found the byte 0x{found:02x} at {error.start}"
    return getattr(error, "strerror", None) or str(error)


class DrivetrainError(Exception):
    """Root of every error that the library raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(DrivetrainError):
    """The configuration is wrong; the message names file, line and nearest key."""

    exit_code = 2


def write_text(path: Path, text: str) -> None:
    """Write a file that a command's option names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror or error}; choose another file"
        ) from error


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
