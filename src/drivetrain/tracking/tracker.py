"""The contract of an experiment tracker, and the numbers among logged values."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from drivetrain.availability import is_installed


class Tracker(ABC):
    """Writes a run's settings and values somewhere; lives on the main process only.

    Attributes:
        name: how ``log_with`` names it.
        requires_logging_directory: whether the constructor takes ``logging_dir``.
        module: name of the module that must be installed; "" for none.

    Args:
        run_name: the project or run; passed by position, since options may have that name too.
        logging_dir: a folder for files; only when the tracker requires one.
        options: of the script's ``init_kwargs`` for this tracker.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool] = False
    module: ClassVar[str] = ""

    @classmethod
    def available(cls) -> bool:
        """Whether the tracker's module is installed."""
        return not cls.module or is_installed(cls.module)

    @property
    @abstractmethod
    def tracker(self) -> Any:
        """The object that does the work, for uses beyond this contract."""

    @abstractmethod
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the run's settings."""

    @abstractmethod
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Store values of one step."""

    def finish(self) -> None:
        """Write buffered values, and let go."""
        return


def as_number(value: Any) -> float | int | None:
    """Return a number, or a tensor or array of one element, as a plain number; None for others."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | bytes):
        return None
    item = getattr(value, "item", None)
    if not callable(item):
        return None
    try:
        number = item()
    except (RuntimeError, ValueError, TypeError):  # more than one element
        return None
    return number if isinstance(number, int | float) else None
