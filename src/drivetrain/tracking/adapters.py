"""The trackers that come with the library: JSON lines, TensorBoard, and clients of services."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, TextIO

from typing_extensions import override

from drivetrain.availability import is_installed, is_tensorboard_available
from drivetrain.errors import ConfigError
from drivetrain.tracking.trackers import Tracker, as_number

_PARAMETERS_PER_CALL, _LONGEST_PARAMETER = 100, 500
"""Limits that every MLflow server accepts: parameters in one call, characters in one value."""

_SERIES = ("eval", "test", "train")
"""Beginnings of names, with a ``_`` behind, whose values ClearML draws in one plot."""


class JsonlTracker(Tracker):
    """Appends JSON objects to ``LOGGING_DIR/RUN_NAME.jsonl``; a reader sees each line at once.

    It needs no other package. NaN, infinity, and objects unknown to JSON become text.
    """

    name: ClassVar[str] = "jsonl"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | Path) -> None:
        folder = Path(logging_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{run_name.replace('/', '_')}.jsonl"
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    @property
    @override
    def tracker(self) -> TextIO:
        return self._file

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._write({"time": time.time(), "config": dict(values)})

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self._write({"time": time.time(), "step": step, **values, **options})

    @override
    def finish(self) -> None:
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        self._file.flush()


class TensorboardTracker(Tracker):
    """Writes event files to ``LOGGING_DIR/RUN_NAME``, by torch's writer or by tensorboardX.

    Numbers are scalars, mappings groups of scalars, all other values text.
    """

    name: ClassVar[str] = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True
    module: ClassVar[str] = "tensorboardX"

    _writer: Any

    def __init__(self, run_name: str, logging_dir: str | Path, **options: Any) -> None:
        self._folder, self._options = Path(logging_dir) / run_name, options

    @classmethod
    @override
    def available(cls) -> bool:
        return is_tensorboard_available()

    @override
    def start(self) -> None:
        self._writer = _writer_class()(str(self._folder), **self._options)

    @property
    @override
    def tracker(self) -> Any:
        return self._writer

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter``: ``tracker`` by the name that scripts use."""
        return self._writer

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        plain = (bool, int, float, str)
        shown = {k: v if isinstance(v, plain) else str(v) for k, v in values.items()}
        self._writer.add_hparams(shown, metric_dict={})
        self._writer.flush()

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for key, value in values.items():
            number = as_number(value)
            if number is not None:
                self._writer.add_scalar(key, number, global_step=step, **options)
            elif isinstance(value, Mapping):
                self._writer.add_scalars(key, dict(value), global_step=step, **options)
            else:
                self._writer.add_text(key, str(value), global_step=step, **options)
        self._writer.flush()

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, **options: Any
    ) -> None:
        """Write batches of images by name, each as ``SummaryWriter.add_images`` takes it."""
        for key, images in values.items():
            self._writer.add_images(key, images, global_step=step, **options)
        self._writer.flush()

    @override
    def finish(self) -> None:
        self._writer.close()


class ServiceTracker(Tracker):
    """A tracker of a service, whose run begins with ``start``; the class names the library's calls.

    Attributes:
        begin: begins a run; gets ``run_name`` and the options of the script.
        project: the option that ``run_name`` is.
        configure: of the run, takes its settings, and the options ``configuring``.
        end: of the run.
        run: the run, once it has begun.
    """

    begin: ClassVar[str] = "init"
    project: ClassVar[str] = "project"
    configure: ClassVar[str] = "config.update"
    configuring: ClassVar[Mapping[str, Any]] = {}
    end: ClassVar[str] = "finish"
    run: Any

    def __init__(self, run_name: str, /, **options: Any) -> None:
        self._options = {self.project: run_name, **options}

    @override
    def start(self) -> None:
        self.run = self._library(self.begin)(**self._options)

    def _library(self, name: str) -> Any:
        """Return something of the library, which is imported when it is first needed."""
        return attrgetter(name)(import_module(self.module))

    @property
    @override
    def tracker(self) -> Any:
        return self.run

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        attrgetter(self.configure)(self.run)(dict(values), **self.configuring)

    @override
    def finish(self) -> None:
        attrgetter(self.end)(self.run)()


class WandbTracker(ServiceTracker):
    """A run of Weights & Biases in the project ``run_name``; ``options`` go to ``wandb.init``."""

    name: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"
    shares_steps: ClassVar[bool] = True
    configuring: ClassVar[Mapping[str, Any]] = {"allow_val_change": True}

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self.run.log(dict(values), step=step, **options)

    def log_images(
        self, values: Mapping[str, Iterable[Any]], step: int | None = None, **options: Any
    ) -> None:
        """Write images by name: arrays or images of PIL."""
        image = self._library("Image")
        for key, images in values.items():
            self.log({key: [image(each) for each in images]}, step, **options)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Write a table, given by columns and rows or as a data frame."""
        table = self._library("Table")(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step, **options)


class TrackioTracker(WandbTracker):
    """A run of trackio, a local tracker without an account; ``options`` go to ``trackio.init``.

    Settings are sent with the first values.
    """

    name: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"
    configuring: ClassVar[Mapping[str, Any]] = {}


class SwanLabTracker(WandbTracker):
    """A run of SwanLab in the project ``run_name``; ``options`` go to ``swanlab.init``."""

    name: ClassVar[str] = "swanlab"
    module: ClassVar[str] = "swanlab"

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._library("config.update")(dict(values))

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        text = self._library("Text")
        shown = {key: text(v) if isinstance(v, str) else v for key, v in values.items()}
        super().log(shown, step, **options)


class MlflowTracker(ServiceTracker):
    """A run in the experiment ``run_name``; ``options`` go to ``mlflow.start_run``.

    Settings are parameters, nested ones with a dot in their names. Numbers are metrics, all other
    values tags.
    """

    name: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"

    def __init__(self, run_name: str, /, **options: Any) -> None:
        self._experiment, self._options = run_name, options

    @override
    def start(self) -> None:
        self._library("set_experiment")(self._experiment)
        self.run = self._library("start_run")(**self._options)

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        parameters = [(name, str(v)[:_LONGEST_PARAMETER]) for name, v in _flat(values)]
        for start in range(0, len(parameters), _PARAMETERS_PER_CALL):
            part = dict(parameters[start : start + _PARAMETERS_PER_CALL])
            self._library("log_params")(part)

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        numbers, others = _divided(values)
        if numbers:
            self._library("log_metrics")(numbers, step=step, **options)
        if others:
            tags = {k: text[:_LONGEST_PARAMETER] for k, text in others.items()}
            self._library("set_tags")(tags)

    @override
    def finish(self) -> None:
        self._library("end_run")()


class CometMLTracker(ServiceTracker):
    """An experiment of Comet in the project ``run_name``; ``options`` go to ``comet_ml.start``.

    Numbers are metrics, nested ones with a dot in their names; all other values are texts.
    """

    name: ClassVar[str] = "comet_ml"
    module: ClassVar[str] = "comet_ml"
    shares_steps: ClassVar[bool] = True
    begin, project = "start", "project_name"
    configure, end = "log_parameters", "end"

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        numbers, others = _divided(values)
        if numbers:
            self.run.log_metrics(numbers, step=step, **options)
        for key, value in others.items():
            self.run.log_other(key, value)


class AimTracker(ServiceTracker):
    """A run in the Aim repository of the logging folder; ``options`` go to ``aim.Run``.

    Numbers are sequences, nested ones with a dot in their names; all other values are texts.
    """

    name: ClassVar[str] = "aim"
    requires_logging_directory: ClassVar[bool] = True
    module: ClassVar[str] = "aim"
    begin, end = "Run", "close"

    def __init__(self, run_name: str, logging_dir: str | Path, **options: Any) -> None:
        self._name, self._options = run_name, {"repo": str(logging_dir), **options}

    @override
    def start(self) -> None:
        Path(self._options["repo"]).mkdir(parents=True, exist_ok=True)
        super().start()
        self.run.name = self._name

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.run.set("hparams", dict(values), strict=False)

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        numbers, others = _divided(values)
        text = self._library("Text")
        for key, value in {**numbers, **{key: text(each) for key, each in others.items()}}.items():
            self.run.track(value, name=key, step=step, **options)


class ClearMLTracker(ServiceTracker):
    """A task of ClearML in the project ``run_name``; ``options`` go to ``clearml.Task.init``.

    A task that the script has begun is used, and stays open. ``eval_loss`` and ``test_loss`` are
    series of the plot ``loss``. Values without a step are single values; texts go to the console.
    """

    name: ClassVar[str] = "clearml"
    module: ClassVar[str] = "clearml"
    begin, project = "Task.init", "project_name"
    configure, end = "connect_configuration", "close"
    _is_of_script: bool

    def __init__(self, run_name: str, /, **options: Any) -> None:
        super().__init__(run_name, **{"task_name": run_name, **options})

    @override
    def start(self) -> None:
        self.run = self._library("Task.current_task")()
        self._is_of_script = self.run is not None
        if not self._is_of_script:
            super().start()

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        logger = self.run.get_logger()
        numbers, others = _divided(values)
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
            super().finish()


class DVCLiveTracker(ServiceTracker):
    """Files of DVCLive; ``options`` go to ``dvclive.Live``, its folder ``dir`` among them.

    Numbers are metrics, nested ones with a dot in their names. DVCLive keeps no texts over time, so
    ``log`` leaves out all other values.
    """

    name: ClassVar[str] = "dvclive"
    module: ClassVar[str] = "dvclive"
    shares_steps: ClassVar[bool] = True
    begin, project = "Live", "exp_name"
    configure, end = "log_params", "end"

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        if step is not None:
            self.run.step = step
        for key, number in _divided(values)[0].items():
            self.run.log_metric(key, number, **options)
        self.run.next_step()


def _plain(value: Any) -> Any:
    """Return a value of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    number = as_number(value)
    if number is None:
        return str(value)
    return number if math.isfinite(number) else str(number)


def _writer_class() -> Any:
    if is_installed("tensorboard"):
        return import_module("torch.utils.tensorboard").SummaryWriter
    if is_installed("tensorboardX"):
        return import_module("tensorboardX").SummaryWriter
    raise ConfigError(
        "the tracker 'tensorboard' needs tensorboard or tensorboardX, found neither; "
        "pip install tensorboardX, or log_with='jsonl'"
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, by names with a dot between the keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _divided(values: Mapping[str, Any]) -> tuple[dict[str, float | int], dict[str, str]]:
    """Return the numbers among nested values, and all others as texts, by names with dots."""
    numbers: dict[str, float | int] = {}
    others: dict[str, str] = {}
    for key, value in _flat(values):
        number = as_number(value)
        if number is None:
            others[key] = str(value)
        else:
            numbers[key] = number
    return numbers, others
