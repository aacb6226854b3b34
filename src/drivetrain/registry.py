"""Finds strategies, stores and trackers by entry point, ours and strangers' alike.

A plugin is a distribution that declares an entry point in one of three groups; nothing in the core
lists or imports one by name. Loading is lazy: asking for names imports no plugin.
"""

import difflib
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from drivetrain.errors import ConfigError, UnknownPluginError

STRATEGIES = "drivetrain.strategies"
STORES = "drivetrain.stores"
TRACKERS = "drivetrain.trackers"


class Registry:
    """The plugins of one entry-point group.

    Args:
        group: the entry-point group, for example ``drivetrain.strategies``.
    """

    def __init__(self, group: str) -> None:
        self.group = group

    @property
    def kind(self) -> str:
        """What one plugin is called in messages: strategy, store or tracker."""
        return {STRATEGIES: "strategy", STORES: "store", TRACKERS: "tracker"}[self.group]

    @property
    def names(self) -> list[str]:
        """The installed names, sorted."""
        return sorted(self._entries)

    def load(self, name: str) -> Any:
        """Import and return the plugin of this name.

        Raises:
            UnknownPluginError: nothing of this name is installed; the message lists what is.
            ConfigError: the plugin is installed but cannot be imported.
        """
        entry = self._entries.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownPluginError(
                f"unknown {self.kind} {name!r}; {hint}installed: {', '.join(self.names) or 'none'}"
            )
        try:
            return entry.load()
        except Exception as error:
            raise ConfigError(
                f"the {self.kind} {name!r} ({entry.value}) cannot be imported: "
                f"{type(error).__name__}: {error}; reinstall the distribution that provides it"
            ) from error

    def default(self) -> str:
        """Return the name of the plugin that declares itself the default.

        Raises:
            ConfigError: not exactly one installed plugin does.
        """
        claimants = [name for name in self.names if self.load(name).default]
        if len(claimants) != 1:
            raise ConfigError(
                f"expected one default {self.kind}, found {claimants or 'none'}; "
                f"name one of: {', '.join(self.names) or 'none installed'}"
            )
        return claimants[0]

    def find_config(self, name: str) -> tuple[str, type]:
        """Return the full name ("" means the default) and the plugin's Config dataclass."""
        name = name or self.default()
        return name, self.load(name).Config

    @cached_property
    def _entries(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self.group):
            other = found.setdefault(entry.name, entry)
            if other.value != entry.value:
                raise ConfigError(
                    f"two distributions provide the {self.kind} {entry.name!r}: "
                    f"{other.value} and {entry.value}; uninstall one"
                )
        return found


def strategies() -> Registry:
    """Return the registry of strategies."""
    return Registry(STRATEGIES)


def stores() -> Registry:
    """Return the registry of tensor stores."""
    return Registry(STORES)


def trackers() -> Registry:
    """Return the registry of experiment trackers."""
    return Registry(TRACKERS)
