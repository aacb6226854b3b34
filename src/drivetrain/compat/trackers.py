"""Tracker classes that a script registers, for ``log_with`` to name."""

import warnings
from typing import Any

from drivetrain.errors import UsageError
from drivetrain.tracking import Tracker

LOGGER_TYPE_TO_CLASS: dict[str, type[Tracker]] = {}
"""The registered classes by name; installed trackers are found without being here."""


def register_tracker_class(tracker_class: type[Tracker]) -> None:
    """Let ``Accelerator(log_with=tracker_class.name)`` find a class.

    Raises:
        UsageError: no class of trackers, or one without a name.
    """
    is_tracker = isinstance(tracker_class, type) and issubclass(tracker_class, Tracker)
    name = getattr(tracker_class, "name", None)
    if not is_tracker or not name:
        raise UsageError(
            f"expected a subclass of GeneralTracker with a name, found {tracker_class!r}; derive "
            "it from GeneralTracker, and set its attribute name"
        )
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"the tracker {name!r} was registered before, and is now {tracker_class!r}",
            UserWarning,
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def registered(log_with: Any) -> Any:
    """Return ``log_with`` with registered classes in place of their names."""
    if isinstance(log_with, list | tuple):
        return [registered(each) for each in log_with]
    return LOGGER_TYPE_TO_CLASS.get(log_with, log_with) if isinstance(log_with, str) else log_with
