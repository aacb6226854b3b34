"""TensorBoard files, by torch's writer or by tensorboardX, whichever is installed."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from drivetrain.availability import is_installed, is_tensorboard_available
from drivetrain.errors import ConfigError
from drivetrain.tracking.tracker import Tracker, as_number


class TensorboardTracker(Tracker):
    """Writes event files to ``LOGGING_DIR/RUN_NAME``."""

    name: ClassVar[str] = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True
    module: ClassVar[str] = "tensorboardX"

    def __init__(self, run_name: str, /, logging_dir: str | Path, **options: Any) -> None:
        self._writer = _writer_class()(str(Path(logging_dir) / run_name), **options)

    @classmethod
    @override
    def available(cls) -> bool:
        """Whether TensorBoard or tensorboardX is installed."""
        return is_tensorboard_available()

    @property
    @override
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self._writer

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the settings as hyperparameters."""
        plain = (bool, int, float, str)
        shown = {k: v if isinstance(v, plain) else str(v) for k, v in values.items()}
        self._writer.add_hparams(shown, metric_dict={})
        self._writer.flush()

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write numbers as scalars, mappings as groups of scalars, all else as text."""
        for key, value in values.items():
            number = as_number(value)
            if number is not None:
                self._writer.add_scalar(key, number, global_step=step, **options)
            elif isinstance(value, Mapping):
                self._writer.add_scalars(key, dict(value), global_step=step, **options)
            else:
                self._writer.add_text(key, str(value), global_step=step, **options)
        self._writer.flush()

    @override
    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()


def _writer_class() -> Any:
    if is_installed("tensorboard"):
        return import_module("torch.utils.tensorboard").SummaryWriter
    if is_installed("tensorboardX"):
        return import_module("tensorboardX").SummaryWriter
    raise ConfigError(
        "the tracker 'tensorboard' needs tensorboard or tensorboardX, found neither; "
        "pip install tensorboardX, or log_with='jsonl'"
    )
