"""Finds strategies, stores, trackers, methods, commands and more by entry point, anybody's alike.

A plugin is a distribution with an entry point in one of seven groups; the core lists and imports no
plugin by name. Loading is lazy: asking for names imports no plugin, and neither does asking for a
summary or a role, for which a second entry point has the same target. An outline is the part of a
plugin that configurations need: a second entry point is named by the plugin's target.
"""

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from drivetrain.errors import ConfigError, UnknownPluginError

STRATEGIES = "drivetrain.strategies"
STORES = "drivetrain.stores"
OPTIMIZER_BACKENDS = "drivetrain.optimizer_backends"
TRACKERS = "drivetrain.trackers"
COMMANDS = "drivetrain.commands"
FORMATS = "drivetrain.formats"
COMPRESSORS = "drivetrain.compressors"
SUMMARIES = "drivetrain.summaries"
ROLES = "drivetrain.roles"
OUTLINES = "drivetrain.outlines"

_KINDS = {
    STRATEGIES: "strategy",
    STORES: "store",
    OPTIMIZER_BACKENDS: "optimizer backend",
    TRACKERS: "tracker",
    COMMANDS: "command",
    FORMATS: "format",
    COMPRESSORS: "method",
}


@dataclass(eq=False)
class Registry:
    """The plugins of one entry-point group.

    Attributes:
        group: the entry-point group, for example ``drivetrain.strategies``.
    """

    group: str

    @property
    def kind(self) -> str:
        """The name of one plugin in messages: such as strategy, store or method."""
        return _KINDS[self.group]

    @property
    def names(self) -> list[str]:
        """The installed names, sorted."""
        return sorted(self._entries)

    @property
    def choices(self) -> list[str]:
        """The names for training: without the reference, if one is installed."""
        return [name for name in self.names if name not in self._with_role("reference")]

    def load(self, name: str) -> Any:
        """Import and return the plugin of this name.

        Raises:
            UnknownPluginError: the name is not installed; the message lists the installed names.
            ConfigError: the plugin is installed but cannot be imported, or two distributions
                provide one of this name.
        """
        return self._imported(name, self._entry(name))

    def outline(self, name: str) -> Any:
        """Import and return what configurations need of a plugin: by default all of the plugin.

        Entry points of ``drivetrain.outlines`` have the plugin's own target for a name.

        Raises:
            UnknownPluginError: as ``load``.
            ConfigError: as ``load``.
        """
        entry = self._entry(name)
        lines = self._groups[OUTLINES].select(name=entry.value)
        return self._imported(name, next(iter(lines), entry))

    def _entry(self, name: str) -> EntryPoint:
        """Return the entry point of a name, which imports nothing."""
        entries = self._entries.get(name)
        if entries is None:
            near = difflib.get_close_matches(name.lower(), self.names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownPluginError(
                f"unknown {self.kind} {name!r}; {hint}installed: {', '.join(self.names) or 'none'}"
            )
        if len(entries) > 1:
            raise ConfigError(
                f"two distributions provide the {self.kind} {name!r}: "
                f"{' and '.join(sorted(entries))}; uninstall one"
            )
        return next(iter(entries.values()))

    def _imported(self, name: str, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except Exception as error:
            raise ConfigError(
                f"the {self.kind} {name!r} ({entry.value}) cannot be imported: "
                f"{type(error).__name__}: {error}; reinstall the distribution that provides it"
            ) from error

    def origin(self, name: str) -> str:
        """Return the top packages that provide an installed name, without importing them."""
        modules = (value.partition(":")[0] for value in self._entries[name])
        return " and ".join(sorted({module.partition(".")[0] for module in modules}))

    def summary(self, name: str) -> str:
        """Return a line about an installed plugin, without importing it.

        Entry points of ``drivetrain.summaries`` have such lines for names, and the plugin's own
        target. A plugin without one is described by the packages that provide the plugin.
        """
        lines = self._groups[SUMMARIES]
        found = [line.name for line in lines if line.value in self._entries[name]]
        return found[0] if found else f"from {self.origin(name)}"

    def default(self) -> str:
        """Return the name of the plugin for runs that name none.

        Raises:
            ConfigError: not exactly one installed plugin has this role.
        """
        return self._only("default")

    def reference(self) -> str:
        """Return the name of the plugin whose numbers count as right.

        Raises:
            ConfigError: not exactly one installed plugin has this role.
        """
        return self._only("reference")

    def find_config(self, name: str) -> tuple[str, type]:
        """Return the full name ("" means the default) and the plugin's Config dataclass."""
        name = name or self.default()
        return name, self.outline(name).Config

    def _only(self, role: str) -> str:
        """Return the name of the one plugin with a role: no plugin is imported."""
        claimants = self._with_role(role)
        if len(claimants) != 1:
            raise ConfigError(
                f"expected one {role} {self.kind}, found {claimants or 'none'}; "
                f"name one of: {', '.join(self.names) or 'none installed'}"
            )
        return claimants[0]

    def _with_role(self, role: str) -> list[str]:
        lines = self._groups[ROLES]
        targets = {line.value for line in lines if line.name == role}
        return [name for name in self.names if targets.intersection(self._entries[name])]

    @cached_property
    def _groups(self) -> Mapping[str, EntryPoints]:
        return _installed(_search_path())

    @cached_property
    def _entries(self) -> dict[str, dict[str, EntryPoint]]:
        """By name, then by target: a clash of names concerns only a caller of this name."""
        found: dict[str, dict[str, EntryPoint]] = {}
        for entry in self._groups[self.group]:
            found.setdefault(entry.name, {})[entry.value] = entry
        return found


@lru_cache(maxsize=1)
def _installed(path: tuple[tuple[str, int], ...]) -> Mapping[str, EntryPoints]:
    """Return the entry points of our groups: the declarations of every distribution are read."""
    every, found = entry_points(), {}
    for group in (*_KINDS, SUMMARIES, ROLES, OUTLINES):
        found[group] = every.select(group=group)
    return found


def _search_path() -> tuple[tuple[str, int], ...]:
    """Return the import path with the time of each folder's last change: an installation is one."""
    return tuple((entry, _changed(entry or ".")) for entry in sys.path)


def _changed(folder: str) -> int:
    """Return the time of a folder's last change; 0 without such a folder."""
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116 - a Path takes ten times as long to make
    except OSError:
        return 0


def strategies() -> Registry:
    """Return the registry of strategies."""
    return Registry(STRATEGIES)


def stores() -> Registry:
    """Return the registry of tensor stores."""
    return Registry(STORES)


def optimizer_backends() -> Registry:
    """Return the registry of optimizer backends: they keep shards between steps, and step them."""
    return Registry(OPTIMIZER_BACKENDS)


def trackers() -> Registry:
    """Return the registry of experiment trackers."""
    return Registry(TRACKERS)


def commands() -> Registry:
    """Return the registry of commands that plugins add to the command line."""
    return Registry(COMMANDS)


def compressors() -> Registry:
    """Return the registry of methods for slow links."""
    return Registry(COMPRESSORS)


def formats() -> Registry:
    """Return the registry of importers, which translate configurations of other programs."""
    return Registry(FORMATS)
