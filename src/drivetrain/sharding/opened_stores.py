"""Opens the stores that options name, each once."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from drivetrain.errors import ConfigError
from drivetrain.registry import stores
from drivetrain.sharding.offload_options import OffloadOptions
from drivetrain.store import SteppingStore


class OpenedStores:
    """The stores of one model, by name.

    Args:
        options: which ones, and their options.

    Raises:
        UnknownPluginError: no store of this name is installed.
        ConfigError: a store cannot keep optimizer state, or has no option of a name.
    """

    def __init__(self, options: OffloadOptions) -> None:
        self._stores: dict[str, SteppingStore] = {}
        names = sorted({options.optimizer, options.params} - {""})
        kinds = {name: stores().load(name) for name in names}
        settings = dict(options.store_options)
        if options.path:
            settings["path"] = options.path
        known = {name: _knobs(kind) for name, kind in kinds.items()}
        unknown = [key for key in settings if not any(key in knobs for knobs in known.values())]
        if unknown and names:
            described = "; ".join(
                f"{name} has {', '.join(sorted(knobs)) or 'none'}" for name, knobs in known.items()
            )
            raise ConfigError(f"expected options of the stores, found {unknown}: {described}")
        for name, kind in kinds.items():
            self._stores[name] = _open(name, kind, settings)

    @property
    def opened(self) -> Mapping[str, SteppingStore]:
        """All of them, by name."""
        return self._stores

    def get(self, name: str) -> SteppingStore | None:
        """Return the store of a name; None for no name."""
        return self._stores[name] if name else None

    def close(self) -> None:
        """Release memory and files."""
        for store in self._stores.values():
            store.close()


def _knobs(kind: Any) -> set[str]:
    config = getattr(kind, "Config", None)
    return {field.name for field in fields(config)} if is_dataclass(config) else set()


def _open(name: str, kind: Any, settings: dict[str, Any]) -> SteppingStore:
    knobs = _knobs(kind)
    chosen = {key: value for key, value in settings.items() if key in knobs}
    store = kind(kind.Config(**chosen)) if knobs else kind()
    if not isinstance(store, SteppingStore):
        raise ConfigError(
            f"expected a store that keeps optimizer state, found {name!r}, which keeps tensors "
            "only; take one that has stepper(), such as cpu"
        )
    return store
