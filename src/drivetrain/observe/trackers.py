"""Experiment trackers: one small contract, and the trackers that come with the library.

They are started together, and never in the way of training.

The trackers that come with the library: JSON lines, TensorBoard, and clients of services.
"""

import json
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from importlib import import_module
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any, ClassVar, Self, TextIO, TypeAlias

from typing_extensions import override

from drivetrain.availability import is_installed, is_tensorboard_available
from drivetrain.config.resolve import flattened
from drivetrain.errors import ConfigError, UsageError
from drivetrain.log import get_logger
from drivetrain.nested import honor_type
from drivetrain.registry import Registry, trackers

# --- the contract of a tracker, and the trackers of one run ---

logger = get_logger(__name__)

_SECRET = re.compile(
    r"(?:^|[^a-z]|(?-i:[a-z](?=[A-Z])))"
    r"(?:token|(?:api|access|private|secret)[_-]?key|secret|password|passwd|passphrase|pwd|auth|"
    r"bearer|dsn|credentials?)$",
    re.IGNORECASE,
)
"""Whole words at the end of a setting's name."""

_PASSWORD_IN_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://[^/@\s:]*:[^/@\s]+@", re.IGNORECASE)

_WORD_OF_A_TOKENIZER = re.compile(r"(?:bos|cls|eos|mask|pad|sep|unk)_token$", re.IGNORECASE)
_ALL = "all"
MOST_WAITING = 1000
"""Rows of figures that wait for a step of the script; of more, every second row is left out."""


class Tracker(ABC):
    """Writes a run's settings and values somewhere; lives on the main process only.

    Attributes:
        name: how ``log_with`` names it.
        requires_logging_directory: whether the constructor takes ``logging_dir``.
        module: name of the module that must be installed; "" for none.
        shares_steps: whether all values have one counter of steps, which the script moves: figures
            of the library then join the script's next values.

    Args:
        run_name: the project or run; passed by position, since options may have that name too.
        logging_dir: a folder for files; only when the tracker requires one.
        options: of the script's ``init_kwargs`` for this tracker.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool] = False
    module: ClassVar[str] = ""
    shares_steps: ClassVar[bool] = False

    @classmethod
    def available(cls) -> bool:
        """Whether the tracker's module is installed."""
        return not cls.module or is_installed(cls.module)

    @property
    @abstractmethod
    def tracker(self) -> Any:
        """The object that does the work, for uses beyond this contract."""

    def start(self) -> None:
        """Begin the run; called once, before its settings are stored."""
        return

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


Choice: TypeAlias = str | type[Tracker] | Tracker
_Options: TypeAlias = Mapping[str, Mapping[str, Any]] | None


class Trackers:
    """The trackers that ``log_with`` names.

    Args:
        log_with: a name or an enum of it, a class, an object, or a list of these; ``"all"`` takes
            all installed and available trackers.
        logging_dir: folder for trackers with files.
        is_main: whether this process writes; the others only check ``log_with``.
        registry: where names are looked up; None means the installed trackers.

    Raises:
        UnknownPluginError: a name that is not installed; the message lists the installed names.
        ConfigError: a tracker that cannot be used here, or needs a folder and has none.
        UsageError: an entry of ``log_with`` that is neither name, class nor object.
    """

    def __init__(
        self,
        log_with: Choice | Sequence[Choice] | None,
        *,
        logging_dir: str | None,
        is_main: bool = True,
        registry: Registry | None = None,
    ) -> None:
        self._logging_dir = logging_dir
        self._is_main = is_main
        self._chosen = _choose(log_with, logging_dir, registry)
        self._failed: list[Tracker] = []
        self._without_run: list[Tracker] = []
        self._joining: dict[int, list[Mapping[str, float]]] = {}
        self.active: list[Tracker] = []

    def start(
        self, project: str, config: Mapping[str, Any] | None = None, init_kwargs: _Options = None
    ) -> None:
        """Make the trackers and store the settings; keys that look like secrets are left out.

        A failure here ends the run: a typo in the options is better known at the beginning.
        Trackers that were started before are finished first.

        Args:
            project: name of the project that the run belongs to.
            config: the run's settings.
            init_kwargs: arguments of each tracker's constructor, by its name.
        """
        if not self._is_main:
            return
        self.finish()
        for chosen in self._chosen:
            self.active.append(self._made(chosen, project, dict(init_kwargs or {})))
            self.active[-1].start()
        if config is not None:
            shown, secret = _without_secrets(config)
            if secret and self.active:
                logger.warning(
                    "settings whose names look secret are not stored: %s", ", ".join(secret)
                )
            self._each(lambda tracker: tracker.store_init_configuration(shown))

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: _Options = None
    ) -> None:
        """Write values to every tracker; a tracker that fails is reported once and left out.

        Args:
            values: numbers or texts by name.
            step: the step they belong to.
            log_kwargs: arguments of each tracker's ``log``, by its name.
        """
        options = log_kwargs or {}

        def write(tracker: Tracker) -> None:
            newest: Mapping[str, float] = (self._joining.pop(id(tracker), None) or [{}])[-1]
            tracker.log({**newest, **values}, step=step, **options.get(tracker.name, {}))

        self._each(write)

    def log_run(self, values: Mapping[str, float], step: int) -> None:
        """Write figures that the library has measured; the script's own steps stay as they are.

        A tracker that fails here gets no more of these figures, and all of the script's values.

        Args:
            values: numbers by name.
            step: the optimizer step that they end with.
        """
        for tracker in self.active:
            if tracker in self._failed or tracker in self._without_run:
                continue
            if tracker.shares_steps:
                waiting = self._joining.setdefault(id(tracker), [])
                waiting.append(dict(values))
                if len(waiting) > MOST_WAITING:
                    del waiting[:-1:2]
                continue
            self._attempt(
                tracker,
                lambda each: each.log(values, step=step),
                "gets no figures of the run",
                self._without_run,
            )

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return a started tracker, or its wrapped object; an inert object on other processes.

        Raises:
            UsageError: no such tracker was started.
        """
        if not self._is_main:
            return Inert()
        for tracker in self.active:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        started = ", ".join(tracker.name for tracker in self.active) or "none"
        raise UsageError(f"expected a started tracker, found no {name!r}; started: {started}")

    def finish(self) -> None:
        """Finish every tracker, also after failures: buffered values may still be written."""
        active, self.active = self.active, []
        for tracker in active:
            for left in self._joining.pop(id(tracker), ()):
                if tracker not in self._failed:
                    self._attempt(tracker, methodcaller("log", left))
            self._attempt(tracker, methodcaller("finish"))
        self._failed, self._without_run = [], []

    def _made(
        self, chosen: type[Tracker] | Tracker, project: str, init_kwargs: dict[str, Any]
    ) -> Tracker:
        if isinstance(chosen, Tracker):
            return chosen
        options = dict(init_kwargs.get(chosen.name, {}))
        if chosen.requires_logging_directory:
            options.setdefault("logging_dir", self._logging_dir)
        make: Callable[..., Tracker] = chosen
        return make(project, **options)

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in self.active:
            if tracker not in self._failed:
                self._attempt(tracker, act)

    def _attempt(
        self,
        tracker: Tracker,
        act: Callable[[Tracker], None],
        problem: str = "failed and is left out",
        failed: list[Tracker] | None = None,
    ) -> None:
        failed = self._failed if failed is None else failed
        try:
            act(tracker)
        except Exception as error:
            if tracker not in failed:
                failed.append(tracker)
                logger.warning(
                    f"the tracker {tracker.name!r} {problem} from here on: "
                    f"{type(error).__name__}: {error}"
                )


class Inert:
    """Stands for a tracker on processes that do not log: takes every call, does nothing, is false.

    A script may say ``tracker.run.summary["best"] = 1`` on every process.
    """

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):  # copy, pickle and numpy ask for protocols by name
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing."""
        return self

    __getitem__ = __enter__ = __call__

    def __setattr__(self, *args: Any) -> None:
        """Do nothing."""

    __setitem__ = __exit__ = __setattr__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def _without_secrets(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings without those whose names look secret, and the names left out.

    Args:
        config: settings by name; mappings inside, also in lists, are searched as well.

    Returns:
        A new mapping, and the dotted names left out.
    """
    dropped: list[str] = []

    def clean(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            secret = {key for key, item in value.items() if _is_secret(str(key), item)}
            dropped.extend(f"{path}{key}" for key in value if key in secret)
            kept = {key: item for key, item in value.items() if key not in secret}
            return {key: clean(item, f"{path}{key}.") for key, item in kept.items()}
        if isinstance(value, list | tuple):
            items = (clean(item, f"{path}{index}.") for index, item in enumerate(value))
            return honor_type(value, items)
        return value

    return clean(config, ""), dropped


def _is_secret(name: str, value: Any) -> bool:
    """Whether a setting looks like a secret: by its name, and with a text as its value."""
    sounds = _SECRET.search(name) and not _WORD_OF_A_TOKENIZER.search(name)
    holds = isinstance(value, str) and _PASSWORD_IN_ADDRESS.match(value)
    return isinstance(value, str | bytes) and bool(sounds or holds)


def _choose(
    log_with: Choice | Sequence[Choice] | None, logging_dir: str | None, registry: Registry | None
) -> list[type[Tracker] | Tracker]:
    """Return the classes and objects of ``log_with``, each once, checked alike on every process."""
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
    if not item.available():
        needed = item.module or "something that is not installed"
        raise ConfigError(
            f"the tracker {item.name!r} needs {needed}, found none; pip install {needed}, or "
            "log_with='jsonl'"
        )
    if item.requires_logging_directory and logging_dir is None:
        raise ConfigError(
            f"the tracker {item.name!r} writes files, expected a folder for them, found none; pass "
            "project_dir to the Accelerator"
        )
    return item


def _all_usable(installed: Registry, logging_dir: str | None) -> list[type[Tracker] | Tracker]:
    usable = []
    for name in installed.names:
        try:
            tracker: type[Tracker] = installed.load(name)
            if tracker.available():
                usable.append(_usable(tracker, installed, logging_dir))
        except ConfigError as error:
            logger.warning("log_with='all' leaves one out: %s", error)
    return usable


# --- the trackers that come with the library ---

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

    writer: Any
    """The ``SummaryWriter``: ``tracker`` by the name that scripts use."""

    def __init__(self, run_name: str, logging_dir: str | Path, **options: Any) -> None:
        self._folder, self._options = Path(logging_dir) / run_name, options

    @classmethod
    @override
    def available(cls) -> bool:
        return is_tensorboard_available()

    @override
    def start(self) -> None:
        self.writer = _writer_class()(str(self._folder), **self._options)

    @property
    @override
    def tracker(self) -> Any:
        return self.writer

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        plain = (bool, int, float, str)
        shown = {k: v if isinstance(v, plain) else str(v) for k, v in values.items()}
        self.writer.add_hparams(shown, metric_dict={})
        self.writer.flush()

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for key, value in values.items():
            number = as_number(value)
            if number is not None:
                self.writer.add_scalar(key, number, global_step=step, **options)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(key, dict(value), global_step=step, **options)
            else:
                self.writer.add_text(key, str(value), global_step=step, **options)
        self.writer.flush()

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, **options: Any
    ) -> None:
        """Write batches of images by name, each as ``SummaryWriter.add_images`` takes it."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **options)
        self.writer.flush()

    @override
    def finish(self) -> None:
        self.writer.close()


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
        parameters = [(name, str(v)[:_LONGEST_PARAMETER]) for name, v in flattened(values)]
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


def _divided(values: Mapping[str, Any]) -> tuple[dict[str, float | int], dict[str, str]]:
    """Return the numbers among nested values, and all others as texts, by names with dots."""
    numbers: dict[str, float | int] = {}
    others: dict[str, str] = {}
    for key, value in flattened(values):
        number = as_number(value)
        if number is None:
            others[key] = str(value)
        else:
            numbers[key] = number
    return numbers, others
