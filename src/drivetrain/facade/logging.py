"""Experiment trackers as the script sees them: start, log, get, end."""

from collections.abc import Mapping
from typing import Any

from drivetrain.facade.core import Core
from drivetrain.tracking import Trackers


class Logging(Core):
    """The trackers of the Accelerator; only the main process writes."""

    _trackers: Trackers

    @property
    def trackers(self) -> list[Any]:
        """The trackers that ``init_trackers`` started; empty on other processes."""
        return self._trackers.active

    @property
    def project_dir(self) -> str | None:
        """Root folder of the run."""
        folder = self.project_configuration.project_dir
        return None if folder is None else str(folder)

    @property
    def logging_dir(self) -> str | None:
        """Folder of the trackers."""
        folder = self.project_configuration.logging_dir or self.project_configuration.project_dir
        return None if folder is None else str(folder)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of ``log_with``.

        Args:
            project_name: what the run belongs to.
            config: the run's settings, stored by each tracker.
            init_kwargs: arguments of each tracker by its name.
        """
        self._trackers.start(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Write values to every tracker.

        Args:
            values: numbers or strings by name.
            step: the step they belong to.
            log_kwargs: arguments of each tracker's ``log`` by its name.
        """
        self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or the object it wraps; inert on other processes."""
        return self._trackers.get(name, unwrap)
