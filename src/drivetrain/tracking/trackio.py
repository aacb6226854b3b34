"""trackio, a local tracker without an account: init, config, log and finish."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from typing_extensions import override

from drivetrain.tracking.tracker import Tracker


class TrackioTracker(Tracker):
    """A run in the project ``run_name``; ``options`` are those of ``trackio.init``."""

    name: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"

    def __init__(self, run_name: str, /, **options: Any) -> None:
        self._run = import_module(self.module).init(project=run_name, **options)

    @property
    @override
    def tracker(self) -> Any:
        """The run."""
        return self._run

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the settings in the run's config, which is sent with the first values."""
        self._run.config.update(dict(values))

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log the values of one step."""
        self._run.log(dict(values), step=step, **options)

    @override
    def finish(self) -> None:
        """Write buffered values, and end the run."""
        self._run.finish()
