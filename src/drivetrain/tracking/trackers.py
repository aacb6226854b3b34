"""The trackers of one run: started together, and never in the way of training."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from drivetrain import registry
from drivetrain.errors import ConfigError, UsageError
from drivetrain.log import get_logger
from drivetrain.tracking.tracker import Tracker

logger = get_logger(__name__)

Choice: TypeAlias = str | type[Tracker] | Tracker
_SECRET = re.compile(r"token|key|secret|password", re.IGNORECASE)
_Options: TypeAlias = Mapping[str, Mapping[str, Any]] | None


class Nothing:
    """Stands for a tracker where there is none: every attribute is a call that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def ignore(*args: Any, **kwargs: Any) -> None:
            del args, kwargs

        return ignore


class Trackers:
    """The trackers that ``log_with`` names.

    Args:
        log_with: a name, a class, an object, or a list of these; ``"all"`` takes every installed
            tracker that is available.
        logging_dir: folder for those that write files.
        is_main: whether this process writes.

    Raises:
        UnknownPluginError: a name that is not installed; the message lists what is.
    """

    def __init__(
        self,
        log_with: Choice | Sequence[Choice] | None,
        *,
        logging_dir: str | None,
        is_main: bool = True,
    ) -> None:
        self._logging_dir = logging_dir
        self._is_main = is_main
        self._chosen: list[type[Tracker] | Tracker] = _choose(log_with)
        self._failed: set[str] = set()
        self.active: list[Tracker] = []

    def start(
        self, project: str, config: Mapping[str, Any] | None = None, init_kwargs: _Options = None
    ) -> None:
        """Make the trackers and store the settings; keys that look like secrets are left out.

        Raises:
            ConfigError: a tracker cannot be made, or has no folder to write to.
        """
        if not self._is_main:
            return
        for chosen in self._chosen:
            if isinstance(chosen, Tracker):
                self.active.append(chosen)
                continue
            options = dict((init_kwargs or {}).get(chosen.name, {}))
            if chosen.requires_logging_directory:
                if self._logging_dir is None:
                    raise ConfigError(
                        f"the tracker {chosen.name!r} writes files, expected a folder for them, "
                        "found none; pass project_dir to the Accelerator"
                    )
                options["logging_dir"] = self._logging_dir
            make: Callable[..., Tracker] = chosen
            self.active.append(make(project, **options))
        shown = {k: v for k, v in (config or {}).items() if not _SECRET.search(str(k))}
        if config is not None:
            self._each(lambda tracker: tracker.store_init_configuration(shown))

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: _Options = None
    ) -> None:
        """Write values to every tracker; one that fails is reported once and left out."""
        options = log_kwargs or {}
        self._each(lambda tracker: tracker.log(values, step=step, **options.get(tracker.name, {})))

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return a started tracker, or what it wraps; an inert object on other processes.

        Raises:
            UsageError: no such tracker was started.
        """
        if not self._is_main:
            return Nothing()
        for tracker in self.active:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        started = ", ".join(tracker.name for tracker in self.active) or "none"
        raise UsageError(f"expected a started tracker, found no {name!r}; started: {started}")

    def finish(self) -> None:
        """Finish every tracker."""
        self._each(lambda tracker: tracker.finish())
        self.active = []

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in self.active:
            if tracker.name in self._failed:
                continue
            try:
                act(tracker)
            except Exception as error:
                self._failed.add(tracker.name)
                logger.warning(
                    f"the tracker {tracker.name!r} failed and is left out from here on: "
                    f"{type(error).__name__}: {error}"
                )


def _choose(log_with: Choice | Sequence[Choice] | None) -> list[type[Tracker] | Tracker]:
    installed = registry.trackers()
    if log_with is None:
        return []
    wanted = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    chosen: list[type[Tracker] | Tracker] = []
    for item in wanted:
        name = getattr(item, "value", item)  # an enum of names
        if name == "all":
            loaded = [installed.load(each) for each in installed.names]
            chosen.extend(tracker for tracker in loaded if tracker.available())
        elif isinstance(name, str):
            chosen.append(installed.load(name))
        elif isinstance(item, Tracker) or (isinstance(item, type) and issubclass(item, Tracker)):
            chosen.append(item)
        else:
            raise UsageError(
                f"expected a tracker's name, class or object in log_with, found {item!r}; "
                f"installed: {', '.join(installed.names)}"
            )
    return chosen
