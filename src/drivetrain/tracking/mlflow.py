"""MLflow: an experiment's run, its parameters and its metrics."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar

from typing_extensions import override

from drivetrain.tracking.tracker import Tracker, as_number

_PARAMETERS_PER_CALL, _LONGEST_PARAMETER = 100, 500
"""Limits that every MLflow server accepts: parameters in one call, characters in one value."""


class MlflowTracker(Tracker):
    """A run in the experiment ``run_name``; ``options`` are those of ``mlflow.start_run``."""

    name: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"

    def __init__(self, run_name: str, /, **options: Any) -> None:
        self._mlflow = import_module(self.module)
        self._mlflow.set_experiment(run_name)
        self._run = self._mlflow.start_run(**options)

    @property
    @override
    def tracker(self) -> Any:
        """The active run."""
        return self._run

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the settings as parameters, nested ones with a dot in their names."""
        parameters = [(name, str(v)[:_LONGEST_PARAMETER]) for name, v in _flat(values)]
        for start in range(0, len(parameters), _PARAMETERS_PER_CALL):
            self._mlflow.log_params(dict(parameters[start : start + _PARAMETERS_PER_CALL]))

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log the numbers of one step as metrics, and other values as tags."""
        numbers = {name: as_number(value) for name, value in _flat(values)}
        metrics = {name: number for name, number in numbers.items() if number is not None}
        if metrics:
            self._mlflow.log_metrics(metrics, step=step, **options)
        tags = {n: str(v)[:_LONGEST_PARAMETER] for n, v in _flat(values) if numbers[n] is None}
        if tags:
            self._mlflow.set_tags(tags)

    @override
    def finish(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
