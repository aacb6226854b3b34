"""Trackers of services by their own libraries: Comet, Aim, ClearML, DVCLive and SwanLab."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from drivetrain.tracking.adapters import WandbTracker, divided
from drivetrain.tracking.trackers import Tracker

_SERIES = ("eval", "test", "train")
"""Beginnings of names, with a ``_`` behind, whose values ClearML draws in one plot."""


class CometMLTracker(Tracker):
    """An experiment of Comet in the project ``run_name``; ``options`` go to ``comet_ml.start``.

    Numbers are metrics, nested ones with a dot in their names; all other values are texts.
    """

    name: ClassVar[str] = "comet_ml"
    module: ClassVar[str] = "comet_ml"
    shares_steps: ClassVar[bool] = True

    _experiment: Any

    def __init__(self, run_name: str, /, **options: Any) -> None:
        self._options = {"project_name": run_name, **options}

    @override
    def start(self) -> None:
        self._experiment = import_module(self.module).start(**self._options)

    @property
    @override
    def tracker(self) -> Any:
        return self._experiment

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._experiment.log_parameters(dict(values))

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        numbers, others = divided(values)
        if numbers:
            self._experiment.log_metrics(numbers, step=step, **options)
        for key, value in others.items():
            self._experiment.log_other(key, value)

    @override
    def finish(self) -> None:
        self._experiment.end()


class AimTracker(Tracker):
    """A run in the Aim repository of the logging folder; ``options`` go to ``aim.Run``.

    Numbers are sequences, nested ones with a dot in their names; all other values are texts.
    """

    name: ClassVar[str] = "aim"
    requires_logging_directory: ClassVar[bool] = True
    module: ClassVar[str] = "aim"

    _run: Any

    def __init__(self, run_name: str, logging_dir: str | Path, **options: Any) -> None:
        self._name, self._options = run_name, {"repo": str(logging_dir), **options}

    @override
    def start(self) -> None:
        Path(self._options["repo"]).mkdir(parents=True, exist_ok=True)
        self._run = import_module(self.module).Run(**self._options)
        self._run.name = self._name

    @property
    @override
    def tracker(self) -> Any:
        return self._run

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._run.set("hparams", dict(values), strict=False)

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        numbers, others = divided(values)
        for key, number in numbers.items():
            self._run.track(number, name=key, step=step, **options)
        text = import_module(self.module).Text
        for key, value in others.items():
            self._run.track(text(value), name=key, step=step, **options)

    @override
    def finish(self) -> None:
        self._run.close()


class ClearMLTracker(Tracker):
    """A task of ClearML in the project ``run_name``; ``options`` go to ``clearml.Task.init``.

    A task that the script has begun is used, and stays open. ``eval_loss`` and ``test_loss`` are
    series of the plot ``loss``. Values without a step are single values; texts go to the console.
    """

    name: ClassVar[str] = "clearml"
    module: ClassVar[str] = "clearml"

    _task: Any
    _is_of_script: bool

    def __init__(self, run_name: str, /, **options: Any) -> None:
        self._options = {"project_name": run_name, "task_name": run_name, **options}

    @override
    def start(self) -> None:
        kind = import_module(self.module).Task
        current = kind.current_task()
        self._is_of_script = current is not None
        self._task = current if self._is_of_script else kind.init(**self._options)

    @property
    @override
    def tracker(self) -> Any:
        return self._task

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._task.connect_configuration(dict(values))

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        logger = self._task.get_logger()
        numbers, others = divided(values)
        for key, number in numbers.items():
            if step is None:
                logger.report_single_value(name=key, value=number, **options)
                continue
            series, _, title = key.partition("_")
            if series not in _SERIES:
                series, title = "train", key
            logger.report_scalar(title, series, value=number, iteration=step, **options)
        for key, value in others.items():
            logger.report_text(f"{key}: {value}", print_console=False)

    @override
    def finish(self) -> None:
        if not self._is_of_script:
            self._task.close()


class DVCLiveTracker(Tracker):
    """Files of DVCLive; ``options`` go to ``dvclive.Live``, its folder ``dir`` among them.

    Numbers are metrics, nested ones with a dot in their names. DVCLive keeps no texts over time, so
    ``log`` leaves out all other values.
    """

    name: ClassVar[str] = "dvclive"
    module: ClassVar[str] = "dvclive"
    shares_steps: ClassVar[bool] = True

    _live: Any

    def __init__(self, run_name: str, /, **options: Any) -> None:
        self._options = {"exp_name": run_name, **options}

    @override
    def start(self) -> None:
        self._live = import_module(self.module).Live(**self._options)

    @property
    @override
    def tracker(self) -> Any:
        return self._live

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._live.log_params(dict(values))

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        if step is not None:
            self._live.step = step
        for key, number in divided(values)[0].items():
            self._live.log_metric(key, number, **options)
        self._live.next_step()

    @override
    def finish(self) -> None:
        self._live.end()


class SwanLabTracker(WandbTracker):
    """A run of SwanLab in the project ``run_name``; ``options`` go to ``swanlab.init``."""

    name: ClassVar[str] = "swanlab"
    module: ClassVar[str] = "swanlab"

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        import_module(self.module).config.update(dict(values))

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        text = import_module(self.module).Text
        shown = {key: text(v) if isinstance(v, str) else v for key, v in values.items()}
        super().log(shown, step, **options)
