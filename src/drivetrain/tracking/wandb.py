"""Weights & Biases: init, config, log and finish, nothing else."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from typing_extensions import override

from drivetrain.tracking.tracker import Tracker


class WandbTracker(Tracker):
    """A run in the project ``run_name``; ``options`` are those of ``wandb.init``."""

    name: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"

    def __init__(self, run_name: str, /, **options: Any) -> None:
        self._run = import_module(self.module).init(project=run_name, **options)

    @property
    @override
    def tracker(self) -> Any:
        """The run."""
        return self._run

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the settings in the run's config."""
        self._run.config.update(dict(values), allow_val_change=True)

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log the values of one step."""
        self._run.log(dict(values), step=step, **options)

    @override
    def finish(self) -> None:
        """Upload buffered values, and end the run."""
        self._run.finish()
