"""The contract of a tracker, and the trackers of one run.

They are started together, and never in the way of training.
"""

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Self, TypeAlias

from drivetrain.availability import is_installed
from drivetrain.errors import ConfigError, UsageError
from drivetrain.log import get_logger
from drivetrain.nested import honor_type
from drivetrain.registry import Registry, trackers

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
            try:
                tracker.log(values, step=step)
            except Exception as error:
                self._without_run.append(tracker)
                logger.warning(
                    f"the tracker {tracker.name!r} gets no figures of the run from here on: "
                    f"{type(error).__name__}: {error}"
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
                    self._attempt(tracker, functools.partial(_write, left))
            self._attempt(tracker, lambda each: each.finish())
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

    def _attempt(self, tracker: Tracker, act: Callable[[Tracker], None]) -> None:
        try:
            act(tracker)
        except Exception as error:
            if tracker not in self._failed:
                self._failed.append(tracker)
                logger.warning(
                    f"the tracker {tracker.name!r} failed and is left out from here on: "
                    f"{type(error).__name__}: {error}"
                )


def _write(values: Mapping[str, float], tracker: Tracker) -> None:
    tracker.log(values)


class Inert:
    """Stands for a tracker on processes that do not log: takes every call, does nothing, is false.

    A script may say ``tracker.run.summary["best"] = 1`` on every process.
    """

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):  # copy, pickle and numpy ask for protocols by name
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        del name, value

    def __call__(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing."""
        del args, kwargs
        return self

    def __getitem__(self, key: object) -> Self:
        del key
        return self

    def __setitem__(self, key: object, value: object) -> None:
        del key, value

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del error


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
    problem = _problem(item, logging_dir)
    if problem:
        raise ConfigError(f"the tracker {item.name!r} {problem}")
    return item


def _all_usable(installed: Registry, logging_dir: str | None) -> list[type[Tracker]]:
    usable = []
    for name in installed.names:
        try:
            tracker: type[Tracker] = installed.load(name)
        except ConfigError as error:
            logger.warning("log_with='all' leaves one out: %s", error)
            continue
        problem = _problem(tracker, logging_dir)
        if not problem:
            usable.append(tracker)
        elif tracker.available():
            logger.warning("log_with='all' leaves one out: the tracker %r %s", name, problem)
    return usable


def _problem(tracker: type[Tracker], logging_dir: str | None) -> str:
    """Return why a tracker cannot be used here, "" when it can."""
    if not tracker.available():
        needed = tracker.module or "something that is not installed"
        return f"needs {needed}, found none; pip install {needed}, or log_with='jsonl'"
    if tracker.requires_logging_directory and logging_dir is None:
        return (
            "writes files, expected a folder for them, found none; pass project_dir to the "
            "Accelerator"
        )
    return ""
