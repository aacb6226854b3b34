"""Which trackers ``log_with`` means, checked alike on every process before anything starts."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

from drivetrain.errors import ConfigError, UsageError
from drivetrain.log import get_logger
from drivetrain.registry import Registry, trackers
from drivetrain.tracking.tracker import Tracker

logger = get_logger(__name__)

Choice: TypeAlias = str | type[Tracker] | Tracker
_ALL = "all"


def choose(
    log_with: Choice | Sequence[Choice] | None, logging_dir: str | None, registry: Registry | None
) -> list[type[Tracker] | Tracker]:
    """Return the classes and objects that are asked for, each once.

    Args:
        log_with: names (or enums of names), classes, objects; ``"all"`` means all that can be used.
        logging_dir: the folder for trackers with files.
        registry: where names are looked up; None means the installed trackers.

    Raises:
        UnknownPluginError: a name that is not installed; the message lists the installed names.
        ConfigError: a tracker that cannot be used here, or needs a folder and has none.
        UsageError: an entry that is neither name, class nor object.
    """
    if log_with is None:
        return []
    installed = registry or trackers()
    chosen: list[type[Tracker] | Tracker] = []
    items: Sequence[Any] = log_with if isinstance(log_with, list | tuple) else [log_with]
    for item in items:
        wanted = item.value if isinstance(item, Enum) else item
        found: Sequence[type[Tracker] | Tracker] = (
            _all_usable(installed, logging_dir)
            if wanted == _ALL
            else [_usable(wanted, installed, logging_dir)]
        )
        chosen.extend(tracker for tracker in found if tracker not in chosen)
    return chosen


def _usable(item: Choice, installed: Registry, logging_dir: str | None) -> type[Tracker] | Tracker:
    if isinstance(item, str):
        item = installed.load(item)
    if isinstance(item, Tracker):
        return item
    if not (isinstance(item, type) and issubclass(item, Tracker)):
        raise UsageError(
            f"expected a tracker's name, class or object in log_with, found {item!r}; "
            f"installed: {', '.join(installed.names)}"
        )
    problem = _problem(item, logging_dir)
    if problem:
        raise ConfigError(f"the tracker {item.name!r} {problem}")
    return item


def _all_usable(installed: Registry, logging_dir: str | None) -> list[type[Tracker]]:
    usable = []
    for name in installed.names:
        try:
            tracker: type[Tracker] = installed.load(name)
        except ConfigError as error:
            logger.warning("log_with='all' leaves one out: %s", error)
            continue
        problem = _problem(tracker, logging_dir)
        if not problem:
            usable.append(tracker)
        elif tracker.available():
            logger.warning("log_with='all' leaves one out: the tracker %r %s", name, problem)
    return usable


def _problem(tracker: type[Tracker], logging_dir: str | None) -> str:
    """Return why a tracker cannot be used here, "" when it can."""
    if not tracker.available():
        needed = tracker.module or "something that is not installed"
        return f"needs {needed}, found none; pip install {needed}, or log_with='jsonl'"
    if tracker.requires_logging_directory and logging_dir is None:
        return (
            "writes files, expected a folder for them, found none; pass project_dir to the "
            "Accelerator"
        )
    return ""
