"""The contract of an experiment tracker."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from drivetrain.availability import is_installed


class Tracker(ABC):
    """Writes a run's settings and values somewhere; lives on the main process only.

    Attributes:
        name: how ``log_with`` names it.
        requires_logging_directory: whether the constructor takes ``logging_dir``.
        module: what must be installed; "" for nothing.

    Args:
        run_name: the project or run; passed by position, since options may have that name too.
        logging_dir: a folder for files; only when the tracker requires one.
        options: what the script passed in ``init_kwargs`` for this tracker.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool] = False
    module: ClassVar[str] = ""

    @classmethod
    def available(cls) -> bool:
        """Whether what the tracker needs is installed."""
        return not cls.module or is_installed(cls.module)

    @property
    @abstractmethod
    def tracker(self) -> Any:
        """The object that does the work, for what this contract does not cover."""

    @abstractmethod
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the run's settings."""

    @abstractmethod
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Store values of one step."""

    def finish(self) -> None:
        """Write what is buffered and let go."""
        return
